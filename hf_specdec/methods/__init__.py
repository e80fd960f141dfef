"""Methods, one file each. Importing this package imports them all, which files them in `METHODS`."""

from importlib import import_module
from pkgutil import iter_modules

from hf_specdec.generator import METHODS, SpecGenerator
from hf_specdec.models import EMBEDDED_HEADS, SHIPPED

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
globals().update({generator.__name__: generator for generator in METHODS.values()})
__all__ = [generator.__name__ for generator in METHODS.values()]


def embedded_drafter(name: str) -> SpecGenerator:
    """A generator with a head that ships for the embedded model: "eagle2", "eagle3", "kangaroo", "medusa" or "sps".

    Raises:
        ValueError: for another name.
    """
    if name not in SHIPPED:
        raise ValueError(f"no head {name!r} ships for the embedded model; those that do are {', '.join(SHIPPED)}.")
    return METHODS[SHIPPED[name]](str(EMBEDDED_HEADS / name))
