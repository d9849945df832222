"""Linux's md as a peer: what it does where our arrays go on. docs/raid.md tells what comes out, and cases/raid.py and
crates/raid/tests/write_log.rs do the same to ours."""

import os

import paths
from runner import nightly

# Of both levels the policy that people run, and the one that is there against the write hole; "resync" does as "bitmap".
SEEN = {
    "5 bitmap all": "right",
    "5 bitmap missing": "refused",
    "5 bitmap forced": "wrong",
    "5 ppl all": "right",
    "5 ppl missing": "right",
    "5 ppl forced": "wrong",
    "6 bitmap all": "right",
    "6 bitmap missing": "refused",
    "6 bitmap forced": "wrong",
}


@nightly
def md_refuses_or_makes_up_blocks_after_a_crash_with_a_missing_member(lab):
    """A write is cut off between data and parity; a member is missing; what becomes of a block that was idle?"""
    guest = lab.boot_alone()
    arrays = sorted({",".join(case.split()[:2]) for case in SEEN})
    said = guest.sh(f"{os.path.join(paths.HERE, 'guest', 'md-write-hole')} {paths.MDADM} {' '.join(arrays)}")
    found = dict(line.rsplit(" ", 1) for line in said.splitlines())
    assert found == SEEN, f"docs/raid.md says otherwise:\n{said}"
    refused = guest.sh(f"{paths.MDADM} --create /dev/md1 --run --level=6 --raid-devices=4 --consistency-policy=ppl missing missing missing missing"
                       " 2>&1 || true")
    assert "only supported for RAID level 5" in refused, refused
    guest.sh("dmesg --clear")  # the kernel has told of every error that was made for it
