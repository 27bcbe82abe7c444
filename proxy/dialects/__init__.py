"""Provider wire APIs as pure translators over ``proxy/wire/canonical.py``."""
