"""The bar chart: for every model and workload, each engine's rate against the first engine's, with the figures."""

from pathlib import Path

from offline_bench.results import Results

BAR_ROOM = 0.8  # of the distance between two workloads


def draw(results: Results, path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib (extra `plots`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(results.models), 1, squeeze=False, figsize=(11, 3.6 * len(results.models)), layout="constrained"
    )
    for axis, model in zip(axes[:, 0], results.models):
        draw_model(axis, results, model)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_model(axis, results: Results, model: str) -> None:
    workloads = list(results.models[model])
    width = BAR_ROOM / len(results.engines)
    for position, engine in enumerate(results.engines):
        shown = [results.best_rate(model, engine, name) for name in workloads]
        first = [results.best_rate(model, results.engines[0], name) for name in workloads]
        heights = [mine / base if mine and base else 0.0 for mine, base in zip(shown, first)]
        places = [index + (position - (len(results.engines) - 1) / 2) * width for index in range(len(workloads))]
        bars = axis.bar(places, heights, 0.92 * width, label=engine)
        labels = ["" if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}" for rate in shown]
        axis.bar_label(bars, labels, fontsize=6, padding=1)
    axis.axhline(1.0, color="black", linewidth=0.6)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_title(f"{model}: tokens/s, as a multiple of {results.engines[0]}", loc="left", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
