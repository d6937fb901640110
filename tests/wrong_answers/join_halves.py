def join_halves(top1, total1, out1, top2, total2, out2):
    return max(top1, top2), total1 + total2, (out1 + out2) / 2
