"""Methods, one file each. Importing this package imports them all, which files them in `METHODS`."""

from importlib import import_module
from pkgutil import iter_modules

from hf_specdec.generator import METHODS

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
globals().update({generator.__name__: generator for generator in METHODS.values()})
__all__ = [generator.__name__ for generator in METHODS.values()]
