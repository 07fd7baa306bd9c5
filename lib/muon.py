"""
torch.optim.Muon, with all matrices of one shape updated together.

Torch's own launches fifteen small products for each matrix, one matrix after the other, and a GPU waits
for the processor between them. This file goes when torch updates them together, too (pytorch pull
request 195566, issue 194180).
"""

import torch
from torch.optim._muon import _adjust_lr


class Muon(torch.optim.Muon):
    """The matrices of a group must be of one shape. Settings and state are torch's (with Nesterov's
    momentum, the default), and on a CPU the steps are torch's bit for bit.

    found_inf: a tensor, as GradScaler sets it; where it is 1, a step changes nothing.
    """

    found_inf = torch.zeros(())

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params, grads, momenta = [], [], []
            self._init_group(group, params, grads, momenta)
            if not params:  # none has a gradient
                continue
            weights, grad, momentum = map(torch.stack, (params, grads, momenta))
            new_momentum = momentum.lerp(grad, 1 - group['momentum'])
            update = orthogonal(grad.lerp(new_momentum, group['momentum']), group)
            rate = _adjust_lr(group['lr'], group['adjust_lr_fn'], params[0].shape)
            new_weights = weights * (1 - group['lr'] * group['weight_decay'])
            new_weights.add_(update, alpha=-rate)
            # Not a product with 0 or 1: what was not finite would stay so.
            skips = self.found_inf.bool()
            torch._foreach_copy_(params, torch.where(skips, weights, new_weights).unbind())
            torch._foreach_copy_(momenta, torch.where(skips, momentum, new_momentum).unbind())


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
