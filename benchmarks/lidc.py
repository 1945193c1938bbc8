"""Does converting LIDC stay within memory? 20,000 fake crops of 128 × 128, more than the v1 pickle has, and larger.

python -m benchmarks.lidc            # needs 10 GB of disk in the folder for temporary files
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ambiseg.data.sets.lidc import prepare
from benchmarks.harness import peak_mb, publish, table

SIDE = 128


def main(counts: tuple[int, ...] = (2000, 20000)) -> None:
    print("lidc: converting")
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "data_lidc.pickle")
            write_pickle(path, count)
            rows.append(_measure("v1 pickle", path, count))
            if count == min(counts):
                start = time.perf_counter()
                memory = peak_mb(lambda path=path: pickle.loads(path.read_bytes()))
                size = path.stat().st_size / 1e9
                seconds = f"{time.perf_counter() - start:.0f}"
                rows.append(["pickle.loads of the same", f"{count:,}", f"{size:.2f}", seconds, f"{memory:.0f}"])
            path.unlink()
            path = Path(folder, "data_lidc.hdf5")
            write_hdf5(path, count)
            rows.append(_measure("HDF5 made from it", path, count))
    headers = ["source", "crops", "GB", "seconds", "memory it adds, MB"]
    publish("lidc", "Converting LIDC to a store, one process", table(headers, rows), rows)


def _measure(what: str, path: Path, count: int) -> list[str]:
    start = time.perf_counter()
    memory = peak_mb(lambda: prepare(path, path.parent / f"store-{what}"))
    seconds = time.perf_counter() - start
    return [what, f"{count:,}", f"{path.stat().st_size / 1e9:.2f}", f"{seconds:.0f}", f"{memory:.0f}"]


def cases(count: int) -> Iterator[dict]:
    """Noise in float64, as the original has it, with four discs of which some are empty."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:SIDE, :SIDE]
    distance = np.hypot(y - SIDE / 2, x - SIDE / 2)
    for i in range(count):
        masks = [((distance < 4 + (3 * i + m) % 20) & (m <= i % 4)).astype(np.uint8) for m in range(4)]
        yield {"image": rng.random((SIDE, SIDE)), "masks": masks, "series_uid": f"1.3.6.{i // 17}"}


def write_pickle(path: Path, count: int) -> None:
    """One dictionary of all cases, written one at a time; as ``pickle.dump`` writes it, but for its memo."""
    with open(path, "wb") as file:
        file.write(pickle.PROTO + b"\x03" + pickle.EMPTY_DICT + pickle.MARK)
        for i, case in enumerate(cases(count)):
            if i and i % 1000 == 0:
                file.write(pickle.SETITEMS + pickle.MARK)
            for part in (f"fake{i:05d}_slice", case):
                file.write(pickle.dumps(part, protocol=3)[2:-1])  # without its PROTO and STOP
        file.write(pickle.SETITEMS + pickle.STOP)


def write_hdf5(path: Path, count: int) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        shares = {"train": count * 64 // 100, "val": count * 16 // 100}
        shares["test"] = count - sum(shares.values())
        source = cases(count)
        for part, share in shares.items():
            images = file.create_dataset(f"{part}/images", (share, SIDE, SIDE), np.float64)
            labels = file.create_dataset(f"{part}/labels", (share, SIDE, SIDE, 4), np.uint8)
            uids = file.create_dataset(f"{part}/uids", (share,), np.int64)
            for i in range(share):
                case = next(source)
                images[i], labels[i] = case["image"] - 0.5, np.stack(case["masks"], -1)
                uids[i] = int(case["series_uid"].rpartition(".")[2])


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or (2000, 20000))
