# Value embeddings: each second layer adds the token's row of a table (nanochat without its gate).
from config.vanilla_82m import *

out_dir = 'out/token_82m'
v_residual = 'token'
residual_layers = (1, 3, 5, 7)
