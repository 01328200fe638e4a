//! Generates the sentences about the adaptive limit that appear in advice. `rules` decides when a sentence is needed.
//! The data plane measures the latency and changes the limit.

use bulkhead_api::Adaptive;
use bulkhead_policy::AdaptiveMode;

/// Returns the maximum of the adaptive limit, or `None` if the adaptive limit has no effect.
pub(super) fn enforced_max(adaptive: &Adaptive) -> Option<u64> {
    (adaptive.mode == AdaptiveMode::Enforce).then_some(adaptive.max.into())
}

/// Returns a sentence which explains that more permits would not help because the adaptive limit is the bottleneck.
/// Returns `None` if the adaptive limit has no effect or has reached its maximum.
pub(super) fn bottleneck(adaptive: &Adaptive) -> Option<String> {
    let is_held = adaptive.mode == AdaptiveMode::Enforce && is_below_max(adaptive);
    is_held.then(|| {
        format!(
            "the adaptive limit ({} of at most {}) is the bottleneck: more jobs can run concurrently only \
             if jobs take less time",
            adaptive.limit,
            total(adaptive, adaptive.max)
        )
    })
}

/// Returns the sum of a value over all adaptive limits of a bulkhead. If tenants are isolated, each tenant has its own
/// limit.
fn total(adaptive: &Adaptive, each: u32) -> u64 {
    adaptive.limits.max(1) * u64::from(each)
}

fn is_below_max(adaptive: &Adaptive) -> bool {
    adaptive.limit < total(adaptive, adaptive.max)
}

/// Returns a description of the current adaptive limit and of the measured latency.
pub(super) fn describe(adaptive: &Adaptive) -> String {
    let Adaptive { limit, target_ms, .. } = adaptive;
    let [min, max] = [adaptive.min, adaptive.max].map(|each| total(adaptive, each));
    let Some(latency) = adaptive.latency_ms else {
        return format!(
            "too few jobs have finished to compare the job time with the target of {target_ms} ms"
        );
    };
    let steps =
        format!("the limit was raised {} times and lowered {} times", adaptive.raised, adaptive.lowered);
    let took = format!("90 % of the jobs took at most {latency} ms, with a target of {target_ms} ms");
    let is_late = latency > *target_ms;
    let verdict = match &adaptive.mode {
        mode if *mode == AdaptiveMode::Monitor && is_below_max(adaptive) => {
            format!("with mode = \"enforce\", the limit would let {limit} jobs run concurrently")
        }
        mode if *mode == AdaptiveMode::Monitor => "with mode = \"enforce\", no jobs would be delayed".to_owned(),
        _ if is_late && *limit <= min => {
            "jobs take too long although the limit is at the minimum, so the job time does not depend on the number of \
             concurrent jobs: check why jobs wait, or set a longer target"
                .to_owned()
        }
        _ if !is_below_max(adaptive) => format!("all {max} jobs can run concurrently"),
        _ => format!("{limit} jobs can run concurrently"),
    };
    format!("{took}; {verdict}; {steps}")
}
