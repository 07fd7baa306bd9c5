# The paper's 2M Transformer (Table 4), otherwise as at 82M.
from config.vanilla_82m import *

out_dir = 'out/vanilla_2m'
n_layer, n_head, n_embd = 4, 2, 16  # FFN 56
