//! The array in the DOT language of Graphviz.

use super::runlist::Runlist;
use super::{Array, Channel, Spot, TileKind};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Names on a merged edge before the rest is counted.
const NAMES_SHOWN: usize = 2;

/// Clusters by kind of tile; parallel channels are one edge.
pub(crate) fn dot(array: &Array) -> String {
    let mut dot =
        format!("digraph \"{}\" {{\n  rankdir=BT;\n  label=\"{}\";\n  node [shape=box];\n", array.name, array.title);
    for (kind, name, label) in [
        (TileKind::Shim, "cluster_shim", "Shim DMA"),
        (TileKind::Memtile, "cluster_memtile", "Memory tiles"),
        (TileKind::Core, "cluster_core", "Cores"),
    ] {
        let tiles: Vec<_> = array.tiles.iter().filter(|tile| tile.kind == kind).collect();
        if tiles.is_empty() {
            continue;
        }
        let _ = writeln!(dot, "  subgraph {name} {{\n    label=\"{label}\";");
        for tile in tiles {
            let label =
                [tile.name.as_str(), tile.role.as_str()].into_iter().chain(tile.operations.iter().map(String::as_str));
            let label = label.map(escaped).collect::<Vec<_>>().join("\\n");
            let _ = writeln!(dot, "    {} [label=\"{label}\"];", node(Spot { col: tile.col, row: tile.row }));
        }
        dot.push_str("  }\n");
    }
    let mut edges: BTreeMap<(Spot, Spot), Vec<&Channel>> = BTreeMap::new();
    for channel in &array.channels {
        edges.entry((channel.source, channel.destination)).or_default().push(channel);
    }
    for ((source, destination), channels) in edges {
        let _ = writeln!(dot, "  {} -> {} [label=\"{}\"];", node(source), node(destination), edge_label(&channels));
    }
    dot.push_str("}\n");
    dot
}

fn node(spot: Spot) -> String {
    format!("t{}_{}", spot.col, spot.row)
}

/// `a, b, +n (d=depth)`.
fn edge_label(channels: &[&Channel]) -> String {
    let mut names: Vec<String> = channels.iter().take(NAMES_SHOWN).map(|channel| escaped(&channel.name)).collect();
    if channels.len() > NAMES_SHOWN {
        names.push(format!("+{}", channels.len() - NAMES_SHOWN));
    }
    let mut depths: Vec<String> =
        channels.iter().filter_map(|channel| channel.depth).map(|depth| depth.to_string()).collect();
    depths.dedup();
    let depth = if depths.is_empty() { String::new() } else { format!(" (d={})", depths.join("/")) };
    format!("{}{depth}", names.join(", "))
}

/// The runs in order, each with its buffers.
pub(crate) fn runlist_dot(runlist: &Runlist) -> String {
    let mut dot = format!(
        "digraph \"{}\" {{\n  rankdir=LR;\n  label=\"{}\";\n  node [shape=box];\n",
        runlist.name,
        escaped(&runlist.title)
    );
    for buffer in &runlist.buffers {
        let _ = writeln!(
            dot,
            "  \"{0}\" [shape=cylinder, label=\"{0}\\n{1} B\"];",
            escaped(&buffer.name),
            buffer.len_bytes
        );
    }
    for run in &runlist.runs {
        let _ = writeln!(dot, "  run{} [label=\"{}\"];", run.index, escaped(&run.kernel));
        if run.index > 0 {
            let _ = writeln!(dot, "  run{} -> run{} [style=dashed];", run.index - 1, run.index);
        }
        for argument in &run.arguments {
            let (from, to) = (format!("\"{}\"", escaped(&argument.buffer)), format!("run{}", run.index));
            let (from, to) = if argument.is_written() { (to, from) } else { (from, to) };
            let both = if argument.direction == "inout" { ", dir=both" } else { "" };
            let _ = writeln!(dot, "  {from} -> {to} [label=\"{}\"{both}];", argument.index);
        }
    }
    dot.push_str("}\n");
    dot
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::super::engines;
    use super::*;

    #[test]
    fn parallel_channels_are_one_edge() {
        let dot = dot(&engines::qwen());
        assert!(dot.starts_with("digraph \"qwen_engine\" {\n"), "{dot}");
        for cluster in ["cluster_shim", "cluster_memtile", "cluster_core"] {
            assert!(dot.contains(cluster), "{cluster}");
        }
        assert!(dot.contains("t0_0 -> t0_2 [label=\"weights0 (d=2)\"];"), "{dot}");
        assert!(dot.contains("t3_0 -> t3_2 [label=\"cache (d=1)\"];"));
        let channel = |name: &str, depth| Channel {
            name: name.to_owned(),
            source: Spot { col: 0, row: 0 },
            destination: Spot { col: 0, row: 2 },
            shape: String::new(),
            depth,
            description: String::new(),
        };
        let all = [channel("a", Some(2)), channel("b", Some(2)), channel("c", Some(1)), channel("d", None)];
        assert_eq!(edge_label(&all.iter().collect::<Vec<_>>()), "a, b, +2 (d=2/1)");
        assert_eq!(edge_label(&[&all[3]]), "d");
    }
}
