"""What each method adds to the config groups method and model, and to the stages of a run."""

from ml_collections import config_dict

METHOD_DEFAULTS = {
    "aogpt": dict(
        order="mix(0.1)",  # see aodiff/core/orders.py for every order distribution
    ),
    "ordergpt": dict(
        # Curriculum, as fractions of train.num_steps (ordergpt.md section 10).
        warmup=(0.05, 0.3),  # earliest and latest end of P0
        context_gain=0.2,  # P0 ends when 1 - nll / marginal entropy reaches this
        shift=(0.36, 0.64),  # P2: share of learned orders rises from 0 to 0.8
        settle=0.70,  # P3 ends: only the learned order from here on
        freeze_from=0.5,
        sampler="map",  # or "gumbel"
        # Evidence, graph, teacher and student.
        refresh_every=20,
        probe_orders=1,  # uniform orders per example of a probe: more of them, less noise
        probe_decay=0.9,
        reciprocal="product",
        student="row",
        student_width=128,
        student_lr=3e-3,
        student_steps=10,
    ),
    "mdm": dict(
        noise="count",  # or "time": how many positions are hidden, see aodiff/methods/mdm.py
        schedule="linear",  # of "time": "cosine", "poly(2)"
        times=0,  # of "time": 0 is continuous, else the number of times
        min_time=1e-3,
        weight="bound",  # or "context" (CART), "one": no bounds
        canvas=(),  # or (share, shortest): rows to cut to a random length, at least shortest
    ),
    "flexmdm": dict(
        # When tokens come and when they are revealed, see RISES in aodiff/core/schedules.py.
        insertion="power(1.7)",
        unmasking="power(2.89)",
        last_time=0.999,  # of training; the bound goes to 1 - 1e-5
        floor=1e-3,  # of what is left, in the weights of training
        condition="alpha",  # the share that has come, or "time"
    ),
}
# A policy of positions, and the denoiser that it guides.
REVEAL_POLICY = dict(
    policy="mlp",  # or "transformer", for text
    policy_width=64,
    policy_cells=False,  # the policy knows which cell it looks at: for errors of single cells
    prior=0.0,  # weight of the top log probability in its scores; 0: it starts uniform
    mislead=(),  # cells where the denoiser is made confidently wrong, see aodiff/methods/guided.py
)
METHOD_DEFAULTS |= {
    "sas": dict(
        **REVEAL_POLICY,
        group=8,  # trajectories of each row
        inner_epochs=4,  # steps on the same trajectories
        clip=0.2,
        advantage="batch_rms",  # or "group_std", "reward_to_go"
        kl=0.0,  # weight of the divergence from the policy at the start
    ),
    "sas_denoiser": dict(
        **REVEAL_POLICY,
        random=0.1,  # share of rows with random masks instead of a state of a trajectory
        scope="all",  # what learns: or "last_block", "head"
    ),
}
# What config.method=sas trains beside the policy, see aodiff/stages.py; 0 steps: not at all.
STAGES = {
    "sas": dict(
        denoiser=dict(steps=500, batch=128, lr=2e-3),  # unless checkpoint.init_from names one
        second=dict(steps=0, batch=128, lr=5e-4, random=0.1, scope="all"),
    )
}
METHOD_DEFAULTS["flexmdm_retrofit"] = METHOD_DEFAULTS["flexmdm"]
ANY_ORDER_MODEL = dict(injection="adaln", cond_dim=128, norm="rms", num_sinks=1)
MASKED_MODEL = dict(
    mlp="swiglu",  # or "gelu", "gelu_tanh" (with biases)
    mlp_dim=config_dict.placeholder(int),  # None: 4 * width
    position="learned",  # or "rope", or "grid" for boards
    # What published models have that the small ones here have not.
    num_kv_heads=config_dict.placeholder(int),  # None: num_heads
    rope_base=10_000.0,
    norm="rms",  # or "layer", with a bias
    norm_epsilon=1e-5,
    head_bias=False,
    qkv_bias=False,
    shift=False,  # logits of a position are read one position earlier
    mask_id=config_dict.placeholder(int),  # None: an id of its own
    table_size=config_dict.placeholder(int),  # rows of the embedding; None: as the ids need
)
CLASSES = dict(classes=0)  # 0: a gap has a mean count; K: a law of 0, 1, ..., K or more
MODEL_DEFAULTS = {  # beside what every model has
    "flexmdm": dict(cond_dim=128, **CLASSES),
    "flexmdm_retrofit": MASKED_MODEL
    | dict(
        position="rope",
        anchor_id=config_dict.placeholder(int),  # begins every row, never emitted
        modulators=config_dict.placeholder(int),  # of equally many blocks each; None: of one each
        **CLASSES,
    ),
    "aogpt": ANY_ORDER_MODEL,
    "ordergpt": ANY_ORDER_MODEL,
} | dict.fromkeys(("mdm", "sas", "sas_denoiser"), MASKED_MODEL)
# Beside what every method has in the group sample.
SAMPLE_DEFAULTS = {
    "flexmdm": dict(
        # When tokens come and are revealed: any, with method.condition="alpha" or not.
        insertion="power(2.9)",
        unmasking="power(2.89)",
        count="poisson",  # masks in a gap: or "bernoulli", "floor_bernoulli", "thin"
        reveal="binomial",  # how many at a time: or "poisson"
        rate="exact",  # of a step: or "euler", "exponential", "tau"
        window=(),  # or (w, most): the leftmost w masks for each that is revealed, at most most
        drain=8,  # calls after the last insertion
        stop=1e-3,  # tokens expected to be missing at which a row without masks ends; 0: none
    )
}
SAMPLE_DEFAULTS["flexmdm_retrofit"] = SAMPLE_DEFAULTS["flexmdm"]
