# The paper's 468M Transformer (Table 4), otherwise as at 82M.
from config.vanilla_82m import *

out_dir = 'out/vanilla_468m'
n_layer, n_head, n_embd = 24, 16, 1024  # FFN 3,584
