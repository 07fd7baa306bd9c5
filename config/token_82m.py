# Value embeddings: each second layer's values are the mean of its own and the token's row of a table
# (where modded-nanogpt's learned weights start).
from config.vanilla_82m import *

out_dir = 'out/token_82m'
v_residual = 'token'
residual_layers = (1, 3, 5, 7)
