"""Re-entry: the first calls of a session get the replies of a recorded session.

A session whose record names an origin sends its requests here before lineage sees them.

- ``recorded`` has the calls of the origin and the minted ids that each request echoes, and renames
  these ids to those of the new session
- ``aliases`` translates the names of what runs in the background
- ``grafted_body`` puts the recorded words into the JSON for an upstream of the client's own dialect
- ``judgement`` compares a request with the recorded one, and names the difference
- ``replay`` finds the recorded call of each request, and returns the request that stands for it
- ``replays`` keeps those that are in use
"""
