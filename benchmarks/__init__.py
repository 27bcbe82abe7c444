"""What ``bridle bench`` measures; one file per benchmark, each makes a JSON-ready report."""
