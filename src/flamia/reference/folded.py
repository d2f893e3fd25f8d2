def forward(*a):
    raise SystemExit


def backward(*a):
    raise SystemExit
