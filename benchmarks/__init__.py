"""The measurements of ``bridle bench``: one file per benchmark, which makes a JSON-ready report."""
