def join_halves(top1, total1, out1, top2, total2, out2):
    top = max(top1, top2)
    total1, total2 = total1 * np.exp(top1 - top), total2 * np.exp(top2 - top)
    total = total1 + total2
    return top, total, (total1 * out1 + total2 * out2) / total
