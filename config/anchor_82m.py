# Every layer adds one projection of x_0, which is no layer's own (ExoFormer, arXiv:2601.08131, without
# its norms), with learned weights.
from config.vanilla_82m import *

out_dir = 'out/anchor_82m'
v_residual = 'anchor'
residual_layers = (0, 1, 2, 3, 4, 5, 6, 7)
residual_weights = 'learned'
