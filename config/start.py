# The models of embedding.py with a baseline that starts: the learning rate warms up over 150 of 1,250
# steps, 12%, as in the paper's text (1,200 of 10,000), where embedding.py has 25, 2%.
# $ python compare.py config/start.py --arms="vanilla; resformer: v_residual=True" --rates="(3e-3, 6e-3)"
from config.embedding import *

out_dir = 'out/start/vanilla_1'
warmup_iters = 150
