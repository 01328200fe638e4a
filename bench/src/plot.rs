//! Draws the ratios of the figures as an SVG image. Each figure has a row with one dot per round, the median, and the
//! target. `main` writes the image to the file that the user names. `report` contains the figures and decides whether a
//! target is met.

use std::fmt::Write;

use crate::report::{Figure, Target, short};

const ROW: f64 = 22.0;
const TOP: f64 = 46.0;
const LEFT: f64 = 470.0;
const WIDTH: f64 = 520.0;
const RIGHT: f64 = 150.0;

/// Draws an SVG image of all figures that have a ratio, on a logarithmic scale.
pub(crate) fn draw(figures: &[Figure]) -> String {
    let rows: Vec<(&Figure, f64)> =
        figures.iter().filter_map(|figure| Some((figure, figure.ratio.filter(|r| is_drawn(*r))?))).collect();
    let ratios = rows.iter().flat_map(|(figure, ratio)| rounds(figure).chain([*ratio]).chain(target(figure)));
    let (low, high) = ratios.fold((0.5_f64, 2.0_f64), |(low, high), ratio| (low.min(ratio), high.max(ratio)));
    let (low, high) = (low.log10().floor(), high.log10().ceil());
    let at = |ratio: f64| LEFT + WIDTH * (ratio.log10() - low) / (high - low);
    let (width, height) = (LEFT + WIDTH + RIGHT, TOP + ROW * rows.len() as f64 + 12.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"8\" y=\"18\" font-size=\"14\">Ratios of real to bare: a dot for each round, a bar for \
         the median, a triangle for the target</text>\n"
    );
    let bottom = height - 8.0;
    for power in low as i32..=high as i32 {
        let ratio = 10_f64.powi(power);
        let (x, colour) = (at(ratio), if power == 0 { "#888" } else { "#ddd" });
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom:.1}\" stroke=\"{colour}\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#666\">{ratio}</text>",
            TOP - 6.0
        );
    }
    for (row, (figure, ratio)) in rows.iter().enumerate() {
        let y = TOP + ROW * (row as f64 + 0.5);
        let colour = if figure.is_met() { "#1f6f43" } else { "#b3261e" };
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 10.0,
            y + 4.0,
            escape(&figure.name)
        );
        for ratio in rounds(figure) {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{colour}\" fill-opacity=\"0.35\"/>",
                at(ratio)
            );
        }
        let x = at(*ratio);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" \
             stroke-width=\"3\"/>",
            y - 7.0,
            y + 7.0
        );
        if let Some(target) = target(figure) {
            let x = at(target);
            // The triangle points towards the values that meet the target.
            let side = if figure.target == Target::AtMost { -8.0 } else { 8.0 };
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {:.1} V{:.1} L{:.1} {y:.1} Z\" fill=\"none\" stroke=\"#444\"/>",
                y - 5.0,
                y + 5.0,
                x + side
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{} ({} {})</text>",
            LEFT + WIDTH + 8.0,
            y + 4.0,
            short(*ratio),
            short(figure.real),
            escape(figure.unit)
        );
    }
    svg + "</svg>\n"
}

fn is_drawn(ratio: f64) -> bool {
    ratio.is_finite() && ratio > 0.0
}

/// Returns the target for the figure's ratio, or `None` if the target does not apply to the ratio.
fn target(figure: &Figure) -> Option<f64> {
    let is_of_ratio = matches!(figure.target, Target::AtMost | Target::AtLeast);
    Some(figure.limit).filter(|limit| is_of_ratio && is_drawn(*limit))
}

fn rounds(figure: &Figure) -> impl Iterator<Item = f64> {
    figure.rounds.iter().map(|(bare, real)| real / bare).filter(|ratio| is_drawn(*ratio))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_has_one_line_per_ratio_and_one_dot_per_round() {
        let figure = |name: &str, rounds: &[(f64, f64)], ratio| Figure {
            rounds: rounds.to_vec(),
            ratio,
            ..Figure::alone(name, "µs", 3.0).with_target(Target::AtMost, 1.5)
        };
        let figures = [
            figure("a < b & c", &[(1.0, 1.2), (1.0, 20.0), (0.0, 1.0)], Some(1.2)),
            figure("none", &[], None),
        ];
        let svg = draw(&figures);
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt; b &amp; c") && !svg.contains("none</text>"));
        // Infinite ratios and targets of zero are not drawn.
        let idle = figures.clone().map(|figure| figure.with_target(Target::AtLeast, 0.0));
        assert_eq!(draw(&idle).matches("<path").count(), 0);
        assert_eq!((svg.matches("<circle").count(), svg.matches("<path").count()), (2, 1));
        // The scale goes from 0.1 to 100, so 1.2 is just to the right of the first third.
        let x = LEFT + WIDTH * (1.0 + 1.2_f64.log10()) / 3.0;
        assert!(svg.contains(&format!("x1=\"{x:.1}\"")), "{svg}");
    }
}
