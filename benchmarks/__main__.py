"""``python -m benchmarks``: every table, printed and written to ``benchmarks/results/``."""

import platform

import torch

from benchmarks import data, decisions, evaluation, exporting, mathematics, methods, mose, prediction, serving

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, one thread; ratios are the numbers to compare\n")
    mathematics.main()
    mose.main()
    methods.main()
    evaluation.main()
    data.main()
    prediction.main()
    decisions.main()
    serving.main()
    exporting.main()
