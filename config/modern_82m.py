# What many baselines have had since 2024; every member of the family can be set on top.
from config.vanilla_82m import *

out_dir = 'out/modern_82m'
optimizer = 'muon'
embed_norm = True
qk_norm = True
x0_residual = True
