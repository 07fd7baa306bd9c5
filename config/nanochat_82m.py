# nanochat's value embeddings: the row's share follows from 12 channels of x, for each token and KV head.
from config.vanilla_82m import *

out_dir = 'out/nanochat_82m'
v_residual = 'token'
residual_layers = (1, 3, 5, 7)
residual_weights = 'head'
gate_inputs = 12
residual_lambda = (3.0, 1.0)
