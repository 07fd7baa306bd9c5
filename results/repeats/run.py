"""
train.py of commit 6a42994, in whose checkout this is started, with a faster Muon for processors without bfloat16.

$ python FOLDER/results/repeats/run.py config/start.py ...

Products of bfloat16 are made in float32, and each result is rounded to bfloat16, as in results/sharing/run.py.
Here all matrices of one shape are multiplied together.
"""

import runpy
import sys

import torch

sys.path.insert(0, '.')
from lib import muon


def rounded(x):
    return x.bfloat16().float()


def orthogonal(x, group):
    a, b, c = group['ns_coefficients']
    is_tall = x.size(1) > x.size(2)
    x = x.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group['eps'])
    x = x.float()
    for _ in range(group['ns_steps']):
        square = rounded(x @ x.mT)
        polynomial = rounded(torch.baddbmm(square, square, square, beta=b, alpha=c))
        x = rounded(torch.baddbmm(x, polynomial, x, beta=a))
    x = x.bfloat16()
    return x.mT if is_tall else x


muon.orthogonal = orthogonal
runpy.run_path('train.py', run_name='__main__')
