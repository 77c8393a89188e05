//! The array and the runlist as SVG.

use super::route::{CELL_HEIGHT, CELL_WIDTH, LEFT, Ways, corner};
use super::runlist::Runlist;
use super::{Array, Spot, Tile, TileKind};
use std::fmt::Write;

const WIDTH: f64 = 960.0;
/// Height of a line of the legend, and of what is below the grid at least.
const LEGEND_LINE: f64 = 20.0;
const LEGEND_COLUMNS: usize = 3;
/// Characters of an operation that fit into a cell.
const OPERATION_CHARS: usize = 32;
const FONT: &str = "font-family=\"DejaVu Sans, Verdana, sans-serif\"";

/// The whole picture.
pub(crate) fn svg(array: &Array) -> String {
    let families = families(array);
    let (_, bottom) = corner(array, Spot { col: 0, row: 0 });
    let legend_top = bottom + CELL_HEIGHT + 24.0;
    let lines = families.len().div_ceil(LEGEND_COLUMNS) as f64;
    let height = (legend_top + lines * LEGEND_LINE).max(700.0);
    let mut svg = open(height, &array.title, &array.description, families.iter().map(|family| family.color));
    for row in (0..array.grid.rows).rev() {
        for col in 0..array.grid.columns {
            cell(&mut svg, array, Spot { col, row });
        }
    }
    let ways = Ways::new(array);
    for channel in &array.channels {
        let color = color(channel.family());
        let points: Vec<String> = ways.of(channel).iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let depth = channel.depth.map_or_else(String::new, |depth| format!(", depth {depth}"));
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.4\" marker-end=\"url(#{})\">\
             <title>{}</title></polyline>",
            points.join(" "),
            marker(color),
            escaped(&format!("{}: {}{depth}: {}", channel.name, channel.shape, channel.description))
        );
    }
    for (index, family) in families.iter().enumerate() {
        let x = LEFT + (index % LEGEND_COLUMNS) as f64 * 300.0;
        let y = legend_top + (index / LEGEND_COLUMNS) as f64 * LEGEND_LINE;
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{0:.1}\" x2=\"{1:.1}\" y2=\"{0:.1}\" stroke=\"{2}\" stroke-width=\"2\"/>\
             <text x=\"{3:.1}\" y=\"{y:.1}\" font-size=\"11\">{4}</text>",
            y - 4.0,
            x + 24.0,
            family.color,
            x + 30.0,
            escaped(&family.label)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Channels that are drawn alike.
struct Family {
    color: &'static str,
    label: String,
}

fn families(array: &Array) -> Vec<Family> {
    let mut names: Vec<&str> = Vec::new();
    for channel in &array.channels {
        if !names.contains(&channel.family()) {
            names.push(channel.family());
        }
    }
    let label = |name: &str| {
        let of_family: Vec<_> = array.channels.iter().filter(|channel| channel.family() == name).collect();
        let first = of_family.first()?;
        let count = if of_family.len() > 1 { format!(" ({})", of_family.len()) } else { String::new() };
        let depth = first.depth.map_or_else(String::new, |depth| format!(", depth {depth}"));
        Some(Family { color: color(name), label: format!("{name}{count}: {}{depth}", first.shape) })
    };
    names.into_iter().filter_map(label).collect()
}

/// Gold for what is joined, purple for what is broadcast, shades of blue for the rest.
fn color(family: &str) -> &'static str {
    match family {
        "joined" | "merged" => "#8a6200",
        "slice" | "attended" | "thirds" => "#c9930c",
        "broadcast" | "heads" | "post_normed" => "#7b3fa0",
        "cache" | "cache_in" => "#0b7285",
        "kv_new" | "cache_out" => "#2f9e8f",
        "hidden_out" | "act_in" | "act_out" => "#c2410c",
        "logits" => "#b02a5b",
        _ => "#2563eb",
    }
}

fn marker(color: &str) -> String {
    format!("head-{}", color.trim_start_matches('#'))
}

fn open<'c>(height: f64, title: &str, description: &str, colors: impl Iterator<Item = &'c str>) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"100%\" height=\"100%\" {FONT}>\n\
         <rect width=\"{WIDTH:.0}\" height=\"{height:.0}\" fill=\"#ffffff\"/>\n<defs>"
    );
    let mut colors: Vec<&str> = colors.collect();
    colors.sort_unstable();
    colors.dedup();
    for color in colors {
        let _ = write!(
            svg,
            "<marker id=\"{}\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"6\" markerHeight=\"6\" \
             orient=\"auto\"><path d=\"M0,0 L8,4 L0,8 z\" fill=\"{color}\"/></marker>",
            marker(color)
        );
    }
    let _ = writeln!(
        svg,
        "</defs>\n<text x=\"{LEFT}\" y=\"28\" font-size=\"18\" font-weight=\"bold\">{}</text>\n\
         <text x=\"{LEFT}\" y=\"48\" font-size=\"11\" fill=\"#555555\">{}</text>",
        escaped(title),
        escaped(description)
    );
    svg
}

fn cell(svg: &mut String, array: &Array, spot: Spot) {
    let (x, y) = corner(array, spot);
    let tile = array.tile(spot);
    let (fill, stroke) = match (tile.is_some(), TileKind::of_row(spot.row)) {
        (false, _) => ("#fafafa", "#dddddd"),
        (true, TileKind::Shim) => ("#e8f1fd", "#7aa7e0"),
        (true, TileKind::Memtile) => ("#fdf4dc", "#d9b44a"),
        (true, TileKind::Core) => ("#eef8ee", "#7dbb7d"),
    };
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{CELL_WIDTH}\" height=\"{CELL_HEIGHT}\" rx=\"6\" fill=\"{fill}\" \
         stroke=\"{stroke}\"/>"
    );
    match tile {
        None => {
            let (x, y) = (x + CELL_WIDTH / 2.0, y + CELL_HEIGHT / 2.0 + 4.0);
            let _ = writeln!(
                svg,
                "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"10\" fill=\"#bbbbbb\" text-anchor=\"middle\">[{},{}]</text>",
                spot.col, spot.row
            );
        }
        Some(tile) => tile_text(svg, tile, x, y),
    }
}

fn tile_text(svg: &mut String, tile: &Tile, x: f64, y: f64) {
    let _ = writeln!(
        svg,
        "<text x=\"{0:.1}\" y=\"{1:.1}\" font-size=\"12\" font-weight=\"bold\">{2}</text>\
         <text x=\"{3:.1}\" y=\"{1:.1}\" font-size=\"10\" fill=\"#888888\" text-anchor=\"end\">[{4},{5}]</text>\
         <text x=\"{0:.1}\" y=\"{6:.1}\" font-size=\"10.5\" fill=\"#444444\">{7}</text>",
        x + 10.0,
        y + 20.0,
        escaped(&tile.name),
        x + CELL_WIDTH - 10.0,
        tile.col,
        tile.row,
        y + 36.0,
        escaped(&tile.role)
    );
    let lines = tile.operations.iter().flat_map(|operation| wrapped(operation, OPERATION_CHARS));
    for (line, operation) in lines.enumerate() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"9.5\" fill=\"#333333\">{}</text>",
            x + 10.0,
            y + 52.0 + 12.5 * line as f64,
            escaped(&operation)
        );
    }
}

/// `text` in lines of at most `chars` characters, broken at spaces.
fn wrapped(text: &str, chars: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= chars => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The runs from left to right, the first two, the last and the head; what they read above and below them.
pub(crate) fn runlist_svg(runlist: &Runlist) -> String {
    const HEIGHT: f64 = 620.0;
    const RUN_TOP: f64 = 190.0;
    const RUN_WIDTH: f64 = 150.0;
    const STEP: f64 = 182.0;
    const SHARED_TOP: f64 = 80.0;
    const SHARED_HEIGHT: f64 = 44.0;
    const OWN_TOP: f64 = 300.0;
    const OWN_STEP: f64 = 72.0;
    const BOX_HEIGHT: f64 = 58.0;
    // Left of the boxes each arrow has a track of its own, wide enough for its head.
    const BOX_INDENT: f64 = 38.0;
    const TRACK_STEP: f64 = 9.0;
    let (blue, gold, purple) = ("#2563eb", "#b8860b", "#7b3fa0");
    let mut svg = open(HEIGHT, &runlist.title, &runlist.description, [blue, gold, purple].into_iter());
    let arrow = |svg: &mut String, color: &str, points: &[(f64, f64)], both: bool| {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let start = if both { format!(" marker-start=\"url(#{}-back)\"", marker(color)) } else { String::new() };
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.4\"{start} marker-end=\"url(#{})\"/>",
            points.join(" "),
            marker(color)
        );
    };
    for color in [gold, blue] {
        let _ = writeln!(
            svg,
            "<defs><marker id=\"{}-back\" viewBox=\"0 0 8 8\" refX=\"1\" refY=\"4\" markerWidth=\"6\" markerHeight=\"6\" \
             orient=\"auto\"><path d=\"M8,0 L0,4 L8,8 z\" fill=\"{color}\"/></marker></defs>",
            marker(color)
        );
    }
    let shown = runlist.shown();
    // The buffer that all runs share lies above them, over their whole width.
    let shared = runlist.buffers.iter().find(|buffer| buffer.count == 1 && runlist.uses(&buffer.name) > 1);
    let right = LEFT + STEP * (shown.len() as f64 - 1.0) + RUN_WIDTH;
    if let Some(buffer) = shared {
        buffer_box(
            &mut svg,
            (LEFT, SHARED_TOP, right - LEFT, SHARED_HEIGHT),
            &[buffer.label(), buffer.description.clone()],
        );
    }
    for (place, slot) in shown.iter().enumerate() {
        let x = LEFT + STEP * place as f64;
        let Some(run) = slot else {
            arrow(&mut svg, purple, &[(x - STEP + RUN_WIDTH, RUN_TOP + 32.0), (x, RUN_TOP + 32.0)], false);
            let (x, y) = (x + RUN_WIDTH / 2.0, RUN_TOP + 38.0);
            let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"20\" text-anchor=\"middle\">…</text>");
            continue;
        };
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{RUN_TOP}\" width=\"{RUN_WIDTH}\" height=\"64\" rx=\"6\" fill=\"#eef8ee\" \
             stroke=\"#7dbb7d\"/><text x=\"{0:.1}\" y=\"{1:.1}\" font-size=\"12\" font-weight=\"bold\" \
             text-anchor=\"middle\">run {2}</text><text x=\"{0:.1}\" y=\"{3:.1}\" font-size=\"11\" \
             text-anchor=\"middle\">{4}</text>",
            x + RUN_WIDTH / 2.0,
            RUN_TOP + 26.0,
            run.index,
            RUN_TOP + 46.0,
            escaped(&run.kernel)
        );
        if place > 0 {
            arrow(&mut svg, purple, &[(x - STEP + RUN_WIDTH, RUN_TOP + 32.0), (x, RUN_TOP + 32.0)], false);
        }
        let mut below = 0.0;
        for argument in &run.arguments {
            let both = argument.direction == "inout";
            if shared.is_some_and(|buffer| buffer.name == argument.buffer) {
                let x = x + RUN_WIDTH / 2.0;
                let ends = [(x, SHARED_TOP + SHARED_HEIGHT), (x, RUN_TOP)];
                arrow(&mut svg, gold, &ends, both);
                continue;
            }
            let y = OWN_TOP + below * OWN_STEP;
            let Some(buffer) = runlist.buffers.iter().find(|buffer| buffer.name == argument.buffer) else { continue };
            let frame = (x + BOX_INDENT, y, RUN_WIDTH - BOX_INDENT, BOX_HEIGHT);
            buffer_box(&mut svg, frame, &buffer.lines_of(run.index));
            // The lowest box has the outermost track, so that none is crossed.
            let (track, middle) = (x + BOX_INDENT - TRACK_STEP * (below + 0.8), y + BOX_HEIGHT / 2.0);
            let mut ends = [(x + BOX_INDENT, middle), (track, middle), (track, RUN_TOP + 64.0)];
            if argument.is_written() {
                ends.reverse();
            }
            arrow(&mut svg, blue, &ends, both);
            below += 1.0;
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// A box of (left, top, width, height) with lines of text, the first one bold.
fn buffer_box(svg: &mut String, (x, y, width, height): (f64, f64, f64, f64), lines: &[String]) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height}\" rx=\"4\" fill=\"#fdf4dc\" stroke=\"#d9b44a\"/>"
    );
    for (index, line) in lines.iter().enumerate() {
        let style =
            if index == 0 { "font-size=\"10\" font-weight=\"bold\"" } else { "font-size=\"9\" fill=\"#444444\"" };
        let (x, y) = (x + 6.0, y + 17.0 + 16.0 * index as f64);
        let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{}</text>", escaped(line));
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::engines;
    use super::*;

    /// Whether the segment from `a` to `b`, along an axis, goes through the inside of the rectangle.
    fn crosses(a: (f64, f64), b: (f64, f64), (x, y): (f64, f64)) -> bool {
        let (left, right) = (a.0.min(b.0), a.0.max(b.0));
        let (top, bottom) = (a.1.min(b.1), a.1.max(b.1));
        right > x && left < x + CELL_WIDTH && bottom > y && top < y + CELL_HEIGHT
    }

    #[test]
    fn no_arrow_crosses_a_cell_and_none_leaves_the_picture() {
        for array in [engines::smollm(), engines::qwen(), engines::decoder()] {
            let ways = Ways::new(&array);
            for channel in &array.channels {
                let corners = ways.of(channel);
                for pair in corners.windows(2) {
                    assert!(pair[0].0 == pair[1].0 || pair[0].1 == pair[1].1, "{}: a slanted line", channel.name);
                    for row in 0..array.grid.rows {
                        for col in 0..array.grid.columns {
                            let spot = Spot { col, row };
                            let cell = corner(&array, spot);
                            assert!(!crosses(pair[0], pair[1], cell), "{} {}: {spot:?}", array.name, channel.name);
                        }
                    }
                }
                assert!(corners.iter().all(|(x, y)| (0.0..WIDTH).contains(x) && *y > 0.0), "{}", channel.name);
            }
            let svg = svg(&array);
            assert_eq!(svg.matches("<polyline").count(), array.channels.len());
            assert!(svg.ends_with("</svg>\n"));
        }
    }

    /// Numbers of an attribute of all elements that start like `element`.
    fn numbers(svg: &str, element: &str, attribute: &str) -> Vec<f64> {
        let elements = svg.split('<').filter(|found| found.starts_with(element));
        let value = |found: &str| found.split(&format!(" {attribute}=\"")).nth(1)?.split('"').next()?.parse().ok();
        elements.filter_map(value).collect()
    }

    #[test]
    fn buffers_of_the_runlist_hold_their_text_and_arrows_end_where_data_goes() {
        let runlist = Runlist::new(&super::super::runlist::QWEN3_0_6B);
        let svg = runlist_svg(&runlist);
        let narrowest = numbers(&svg, "rect x", "width").into_iter().fold(f64::INFINITY, f64::min);
        for run in runlist.shown().into_iter().flatten() {
            for argument in run.arguments.iter().filter(|argument| argument.buffer != "act") {
                let buffer = runlist.buffers.iter().find(|buffer| buffer.name == argument.buffer).unwrap();
                let [name, size, about] = buffer.lines_of(run.index);
                // Widths of a bold letter of 10 units, and of a plain one of 9, at most.
                let widest = (6.2 * name.chars().count() as f64).max(4.6 * size.len().max(about.len()) as f64);
                assert!(widest + 12.0 <= narrowest, "{name}, {size}, {about}: {widest} of {narrowest}");
            }
        }
        // The head writes one buffer and reads two: of the four arrows of run 28 below it one goes down.
        let heads: Vec<&str> =
            svg.split("<polyline points=\"").skip(1).map(|line| line.split('"').next().unwrap()).collect();
        let down = heads.iter().filter(|points| {
            let ends: Vec<&str> = points.split(' ').collect();
            ends.len() == 3 && ends[0].ends_with(",254.0")
        });
        assert_eq!(down.count(), 1, "{heads:?}");
    }

    #[test]
    fn long_operations_are_broken_at_spaces() {
        assert_eq!(
            wrapped("Joins 6x256 slices into 1536-elem vector", 32),
            ["Joins 6x256 slices into", "1536-elem vector"]
        );
        assert_eq!(wrapped("", 32), [""]);
    }

    #[test]
    fn the_engines_keep_the_published_view_box() {
        for array in [engines::smollm(), engines::qwen()] {
            assert!(svg(&array).contains("viewBox=\"0 0 960 700\" width=\"100%\" height=\"100%\""), "{}", array.name);
        }
    }
}
