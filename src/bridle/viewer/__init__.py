"""Read-only pages over a store: sessions, turns with tokens, trees, groups, runs and the audit.

``app.py`` has the routes, ``templates/`` their HTML, and the other modules the data that the HTML
shows. ``bridle viewer`` serves the pages, and so does the proxy, behind the admin key, under
``/bridle/viewer``.
"""
