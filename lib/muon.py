"""
Muon for the matrices of attention and MLP, AdamW for everything else, as one optimizer.

Each block of rows is a matrix of its own: q, k and v of c_attn, gate and up of c_fc. Updated whole,
c_attn would take other steps where a layer borrows. Momentum, Newton-Schulz iteration and step size are
those of torch.optim.Muon with adjust_lr_fn='match_rms_adamw', so that AdamW's learning rates serve.
"""

import math

import torch

MOMENTUM = 0.95


class Muon(torch.optim.AdamW):
    """A group's `rows`: those of each matrix in its parameters; (): AdamW updates them."""

    @torch.no_grad()
    def step(self):
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group['rows']]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for p in group['params'] if group['rows'] else ():
                self.update(group, p)

    def update(self, group, p):
        """One step for one parameter; none where the scaler has found an infinite gradient, of which
        only the device knows."""
        state = self.state[p]
        if not state:
            state['step'] = torch.zeros(())  # AdamW looks for one when a state is loaded
            state['momentum_buffer'] = torch.zeros_like(p)
        momentum = state['momentum_buffer']
        averaged = momentum.lerp(p.grad, 1 - MOMENTUM)
        direction = p.grad.lerp(averaged, MOMENTUM)  # Nesterov's

        lr = group['lr']
        stepped = p * (1 - lr * group['weight_decay'])
        blocks = zip(stepped.split(group['rows']), direction.split(group['rows']), strict=True)
        for block, matrix in blocks:
            block.add_(orthogonal(matrix), alpha=-lr * 0.2 * math.sqrt(max(block.shape)))

        found_inf = getattr(self, 'found_inf', None)
        skips = torch.zeros_like(p[0, 0]) if found_inf is None else found_inf
        momentum.copy_(torch.where(skips > 0, momentum, averaged))
        p.copy_(torch.where(skips > 0, p, stepped))


def orthogonal(matrix):
    """About U V^T of a matrix U S V^T, by five steps of Newton-Schulz in bfloat16."""
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)
    return x.T if is_tall else x
