"""Sandboxes in containers, by the command line of docker or podman.

``sandbox.py`` is the sandbox and its provider, ``engine.py`` the command line. ``images.py`` builds
the images that tasks name, and ``layers.py`` the read-only harness that is mounted into them.
``sandboxes/relay.py`` is the one way out. ``warm.py`` forks sessions inside one container.
``inside/`` runs in the container.
"""

from bridle.harnesses.sandboxes.container.sandbox import ContainerProvider, ContainerSandbox
from bridle.harnesses.sandboxes.container.warm import WarmContainerProvider

__all__ = ["ContainerProvider", "ContainerSandbox", "WarmContainerProvider"]
