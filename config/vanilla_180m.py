# The paper's 180M Transformer (Table 4), otherwise as at 82M.
from config.vanilla_82m import *

out_dir = 'out/vanilla_180m'
n_layer, n_head, n_embd = 12, 12, 768  # FFN 2,688
