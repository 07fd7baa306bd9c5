# GPT-2's architecture at 82M's shape, FFN 2,048 (Fig. 12d); add --v_residual=True or
# --share_v=True.
from config.vanilla_82m import *

out_dir = 'out/gpt2_78m'
arch = 'gpt2'
