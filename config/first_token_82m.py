# V_1 and a table's row, both, with learned weights.
from config.vanilla_82m import *

out_dir = 'out/first_token_82m'
v_residual = 'first+token'
residual_layers = (1, 3, 5, 7)
residual_weights = 'learned'
