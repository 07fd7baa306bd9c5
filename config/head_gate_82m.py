# ResFormer whose weights follow from x, for each token and head (x-transformers).
from config.vanilla_82m import *

out_dir = 'out/head_gate_82m'
v_residual = True
residual_weights = 'head'
gate_bias = True
