"""
train.py of commit 1254d86, in whose checkout this is started, with a faster Muon for processors without bfloat16.

$ python FOLDER/results/sharing/run.py config/start.py ...

On such a processor, torch's products in bfloat16 are some fifty times as slow as in float32. Here they are made in
float32, and each result is rounded to bfloat16. Only the order of a sum's terms differs.
"""

import runpy
import sys

import torch

sys.path.insert(0, '.')
from lib import muon


def rounded(x):
    return x.bfloat16().float()


def orthogonal(matrix):
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    x = x.float()
    for _ in range(5):
        gram = rounded(x @ x.T)
        polynomial = rounded(torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315))
        x = rounded(torch.addmm(x, polynomial, x, beta=3.4445))
    x = x.bfloat16()
    return x.T if is_tall else x


muon.orthogonal = orthogonal
sys.argv = ['train.py', *sys.argv[1:]]
runpy.run_path('train.py', run_name='__main__')
