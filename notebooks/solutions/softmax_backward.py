def softmax_backward(p, dp):
    return p * (dp - (p * dp).sum(axis=-1, keepdims=True))
