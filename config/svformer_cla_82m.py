# SVFormer whose keys are shared by pairs of layers, as in CLA.
from config.svformer_82m import *

out_dir = 'out/svformer_cla_82m'
share_k = 2
