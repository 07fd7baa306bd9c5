"""
torch.optim.Muon, with all matrices of one shape updated together.

Torch's own launches fifteen small products for each matrix, one matrix after the other, and a GPU waits
for the processor between them. This file goes when torch updates them together, too (pytorch pull
request 195566, issue 194180).
"""

import torch
from torch.optim._muon import _adjust_lr


class Muon(torch.optim.Muon):
    """Its settings and its state are torch's (with Nesterov's momentum, the default), and on a CPU its
    steps are torch's bit for bit."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group['params']:
                by_shape.setdefault(p.shape, []).append(p)
            for params in by_shape.values():
                self.update({**group, 'params': params})

    def update(self, group):
        """Update the matrices of a group, all of one shape, that have a gradient."""
        params, grads, momenta = [], [], []
        self._init_group(group, params, grads, momenta)
        if not params:
            return
        torch._foreach_lerp_(momenta, grads, 1 - group['momentum'])
        directions = torch._foreach_lerp(grads, momenta, group['momentum'])
        updates = orthogonal(torch.stack(directions), group)
        rate = _adjust_lr(group['lr'], group['adjust_lr_fn'], params[0].shape)
        torch._foreach_mul_(params, 1 - group['lr'] * group['weight_decay'])
        # One launch for all, if they have one type and layout.
        torch._foreach_add_(params, updates.float().contiguous().unbind(), alpha=-rate)


def orthogonal(x, group):
    """For each matrix U S V^T of a stack (n, rows, columns), about U V^T, by Newton and Schulz."""
    a, b, c = group['ns_coefficients']
    is_tall = x.size(1) > x.size(2)
    x = x.bfloat16()
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group['eps'])
    for _ in range(group['ns_steps']):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x
