"""Pages over a store, read-only: sessions, turns with tokens, trees, groups, runs, the audit.

``app.py`` has the routes, ``templates/`` their HTML, the other modules what the HTML shows; it is
served by ``bridle viewer`` and, behind the admin key, by the proxy under ``/bridle/viewer``.
"""
