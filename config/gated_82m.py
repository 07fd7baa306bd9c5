# Gated attention (arXiv:2505.06708): a head's output times a sigmoid gate of the token.
from config.vanilla_82m import *

out_dir = 'out/gated_82m'
output_gate = True
