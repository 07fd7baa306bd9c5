# The upper half of the layers borrows keys and values of the last layer below (as YOCO, Gemma 3n).
from config.vanilla_82m import *

out_dir = 'out/suffix_82m'
share_k = share_v = (0, 1, 2, 3, 3, 3, 3, 3)
