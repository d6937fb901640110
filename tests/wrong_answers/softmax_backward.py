def softmax_backward(p, dp):
    return p * dp
