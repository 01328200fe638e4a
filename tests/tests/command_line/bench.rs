//! Runs all of the bench's default measurements briefly, without checking the figures.

use std::process::{Command, Output};

use bulkhead_tests::programs;

/// Runs the benchmark. The `timeout` command kills the benchmark and its child processes if it runs far too long.
fn bench(arguments: &[&str]) -> Output {
    let mut bench = Command::new("timeout");
    bench.args(["--kill-after=10", "600"]).arg(programs().join("bulkhead-bench"));
    bench.arg("--smoke").args(arguments).output().expect("failed to run the bench")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn bench_reports_all_figures_as_json_and_svg() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg");
    let output = bench(&["--json", "--svg", plot.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("the output must be one JSON object");
    let figures = told["figures"].as_array().expect("figures");
    let is_told = |name: &str| figures.iter().any(|figure| figure["name"] == name);
    for name in [
        "policy: 1 bulkhead, 63 jobs running",
        "64 B, 1 in flight: p50",
        "time from worker kill to next reply",
    ] {
        assert!(is_told(name), "{name}: {told}");
    }
    let compared = figures.iter().filter(|figure| figure["ratio"].is_f64());
    assert!(compared.clone().all(|figure| !figure["rounds"].as_array().unwrap().is_empty()), "{told}");
    let drawn = std::fs::read_to_string(plot).unwrap();
    assert!(compared.clone().all(|figure| drawn.contains(figure["name"].as_str().unwrap())), "{drawn}");
}

#[test]
fn bench_prints_one_line_per_figure() {
    let output = bench(&["--only", "policy: cancel"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines: Vec<_> = text(&output.stdout).lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[1].starts_with("policy: cancel 9,000 amid 10,000 waiting, ns"), "{lines:?}");
}
