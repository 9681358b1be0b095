"""The archive: everything that left a pool, in files, with a catalogue of them.

    pool ──rows of what left──► archiver ──► trajectories/, feedback/   Parquet, sealed
                                    └──────► catalogue-0.sqlite         made of the files

    conversations.py   a group's rows in the journal ──► its trajectories
    parquet.py         trajectories ──► a sealed file, and back
    folder.py          names, lock, tombstones, bounds
    catalogue.py       the index of the files: search, filters, a table per prompt
    launch.py          how a pool starts it
    archiver.py        the process of a pool that writes them
    reader.py          what anybody asks of an archive: find, list, query, check, delete
    unarchived.py      what its files do not have yet: live, or waiting
    lookup.py          one trajectory, wherever it is

Whoever writes holds the lock of its shard. Readers deduplicate by channel, uid, attempt and part.
"""
