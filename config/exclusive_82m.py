# A head's output without its component along the value at its own position (arXiv:2603.09078).
from config.vanilla_82m import *

out_dir = 'out/exclusive_82m'
exclusive = True
