# DenseFormer: depth-weighted averaging after every block.
from config.vanilla_82m import *

out_dir = 'out/denseformer_82m'
denseformer = True
