//! Compares two variants that were measured alternately, as the median of the ratios of all pairs of rounds. A
//! comparison can also show a confidence interval for the difference. The modules that measure run the rounds, and
//! `report` compares the result with its target.

use crate::load::median;
use crate::report::{Difference, Figure, Target};

/// Creates a figure from pairs of rounds. Each pair consists of a bare round and a real round.
pub(crate) fn paired(
    name: String,
    unit: &'static str,
    pairs: &[(f64, f64)],
    target: Target,
    limit: f64,
) -> Figure {
    Figure {
        bare: Some(median(pairs.iter().map(|pair| pair.0).collect())),
        real: median(pairs.iter().map(|pair| pair.1).collect()),
        ratio: Some(median(pairs.iter().map(|(bare, real)| real / bare).collect())),
        rounds: pairs.to_vec(),
        ..Figure::alone(name, unit, f64::NAN).with_target(target, limit)
    }
}

/// Creates a figure that shows the difference between two variants, which were measured alternately.
pub(crate) fn compared(name: &str, unit: &'static str, pairs: &[(f64, f64)]) -> Figure {
    let differences: Vec<f64> = pairs.iter().map(|(without, with)| with - without).collect();
    let figure = paired(name.to_owned(), unit, pairs, Target::Told, f64::NAN);
    Figure { difference: difference(&differences), ..figure }
}

/// Two-sided 95 % quantiles of Student's t-distribution, for one degree of freedom and upwards.
const T_95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// Returns the mean of the paired differences and its 95 % confidence interval, or `None` if there are fewer than two
/// differences.
fn difference(differences: &[f64]) -> Option<Difference> {
    let freedom = differences.len().checked_sub(1).filter(|freedom| *freedom > 0)?;
    let count = differences.len() as f64;
    let mean = differences.iter().sum::<f64>() / count;
    let variance = differences.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / freedom as f64;
    // Beyond the table, the quantiles hardly differ.
    let half = T_95[(freedom - 1).min(T_95.len() - 1)] * (variance / count).sqrt();
    Some(Difference { mean, low: mean - half, high: mean + half })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_interval_uses_students_t() {
        // The mean is 2, the standard deviation is 1, and the standard error is 1 / sqrt(3).
        let found = difference(&[1.0, 2.0, 3.0]).unwrap();
        assert!((found.mean - 2.0).abs() < 1e-9);
        assert!((found.high - found.mean - 4.303 / 3.0_f64.sqrt()).abs() < 1e-9);
        assert!((found.mean - found.low - 4.303 / 3.0_f64.sqrt()).abs() < 1e-9);
        assert!(difference(&[1.0]).is_none() && difference(&[]).is_none());
        let same = difference(&[0.5; 100]).unwrap();
        assert_eq!((same.low, same.high), (0.5, 0.5));
    }
}
