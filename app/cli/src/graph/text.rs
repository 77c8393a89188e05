//! The array as text.

use super::{Array, Channel, Spot, TileKind};
use std::fmt::Write;

/// Width of a cell, and of the text in it.
const CELL: usize = 23;
const TEXT: usize = 21;

/// Title, grid and table of channels.
pub(crate) fn text(array: &Array) -> String {
    let (columns, rows) = (array.grid.columns, array.grid.rows);
    let mut text = format!(
        "=== {} ===\n{}\n\nAIE2 Array Topology (Rows {}..0, Cols 0..{}):\n",
        array.title,
        array.description,
        rows.saturating_sub(1),
        columns.saturating_sub(1)
    );
    let border = format!("+{}\n", format!("{}+", "-".repeat(CELL)).repeat(usize::from(columns)));
    text.push_str(&border);
    for row in (0..rows).rev() {
        let cells: Vec<[String; 2]> = (0..columns).map(|col| cell(array, Spot { col, row })).collect();
        let line = |index: usize| cells.iter().map(|cell| format!(" {} |", cell[index])).collect::<String>();
        let kind = match TileKind::of_row(row) {
            TileKind::Shim => "Shim DMA",
            TileKind::Memtile => "MemTile",
            TileKind::Core => "Core",
        };
        let _ = writeln!(text, "|{} Row {row} ({kind})\n|{}", line(0), line(1));
        text.push_str(&border);
    }
    let _ = writeln!(text, "\nObjectFifo Channels ({} total):", array.channels.len());
    text.push_str(&row(["Channel", "Source", "Destination", "Shape", "Depth", "Description"]));
    let _ = writeln!(text, "{}", "-".repeat(80));
    array.channels.iter().for_each(|channel| text.push_str(&channel_row(channel)));
    text
}

/// Name and role of a tile, each in the middle of its line.
fn cell(array: &Array, spot: Spot) -> [String; 2] {
    let tile = array.tile(spot);
    let name = tile.map_or("Empty", |tile| tile.name.as_str());
    [format!("[{},{}] {name}", spot.col, spot.row), tile.map_or_else(String::new, |tile| tile.role.clone())]
        .map(|line| centred(&line))
}

/// In the middle of [`TEXT`] characters, cut to them; of an odd number of spaces the extra one goes left.
fn centred(line: &str) -> String {
    let line: String = line.chars().take(TEXT).collect();
    let free = TEXT - line.chars().count();
    format!("{}{line}{}", " ".repeat(free.div_ceil(2)), " ".repeat(free / 2))
}

fn channel_row(channel: &Channel) -> String {
    let place = |spot: Spot| format!("({},{})", spot.col, spot.row);
    row([
        &channel.name,
        &place(channel.source),
        &place(channel.destination),
        &channel.shape,
        &channel.depth.map_or_else(|| "-".to_owned(), |depth| depth.to_string()),
        &channel.description,
    ])
}

fn row([name, source, destination, shape, depth, description]: [&str; 6]) -> String {
    format!("{name:<16} {source:<10} {destination:<14} {shape:<16} {depth:<6} {description}\n")
}

#[cfg(test)]
mod tests {
    use super::super::engines;
    use super::*;

    /// The published arrays; their shapes are drawn ones, not those of the buffers.
    const PUBLISHED: [(&str, &str); 3] = [
        (
            include_str!("../../tests/data/graph/visualizer_smollm.json"),
            include_str!("../../tests/data/graph/visualizer_smollm.txt"),
        ),
        (
            include_str!("../../tests/data/graph/visualizer_qwen.json"),
            include_str!("../../tests/data/graph/visualizer_qwen.txt"),
        ),
        (
            include_str!("../../tests/data/graph/visualizer_decoder.json"),
            include_str!("../../tests/data/graph/visualizer_decoder.txt"),
        ),
    ];

    #[test]
    fn published_arrays_are_rendered_as_published() {
        for (json, wanted) in PUBLISHED {
            let array: Array = serde_json::from_str(json).unwrap();
            assert_eq!(text(&array).trim_end(), wanted.trim_end(), "{}", array.name);
            let again = format!("{:#}\n", serde_json::to_value(&array).unwrap());
            assert_eq!(again.trim_end(), json.trim_end(), "{}: the same keys in the same order", array.name);
        }
    }

    #[test]
    fn the_engines_have_the_published_tiles_and_channels() {
        for (published, found) in PUBLISHED.iter().zip([engines::smollm(), engines::qwen()]) {
            let wanted: Array = serde_json::from_str(published.0).unwrap();
            assert_eq!(
                (&found.name, &found.title, &found.description, found.grid),
                (&wanted.name, &wanted.title, &wanted.description, wanted.grid)
            );
            let tiles = |array: &Array| -> Vec<_> {
                let tile =
                    |tile: &super::super::Tile| (tile.col, tile.row, tile.kind, tile.name.clone(), tile.role.clone());
                array.tiles.iter().map(tile).collect()
            };
            assert_eq!(tiles(&found), tiles(&wanted));
            let names = |array: &Array| -> Vec<_> {
                array.channels.iter().map(|channel| (channel.name.clone(), channel.source)).collect()
            };
            assert_eq!(names(&found), names(&wanted));
        }
        let smollm = engines::smollm();
        let shape = |name: &str| smollm.channels.iter().find(|channel| channel.name == name).unwrap().shape.clone();
        assert_eq!(["weights0", "cache", "kv_new"].map(shape), ["bf16[4608]", "bf16[8192]", "bf16[384]"]);
        let hidden = smollm.channels.last().unwrap();
        assert_eq!(hidden.destination, Spot { col: 0, row: 0 }, "through the shim of its own column");
    }

    #[test]
    fn the_decoder_has_a_core_for_every_worker() {
        let decoder = engines::decoder();
        let mut places: Vec<Spot> = decoder.tiles.iter().map(|tile| Spot { col: tile.col, row: tile.row }).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!((places.len(), decoder.tiles.len()), (20, 20), "16 workers and 4 shims, none on another");
        for channel in &decoder.channels {
            for end in [channel.source, channel.destination] {
                assert!(decoder.tile(end).is_some(), "{} ends at {end:?}, where nothing is", channel.name);
            }
        }
        let text = text(&decoder);
        assert!(
            text.contains("qkv_weights      (0,0)      (0,3)          bf16[18432]      -      Blocks of 32x576"),
            "{text}"
        );
    }
}
