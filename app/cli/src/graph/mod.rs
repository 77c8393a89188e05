//! Arrays and dataflow as data, and their forms for people: SVG, DOT, JSON and text.
//!
//! Shapes, depths and places come from the layouts of the backends ([`engines`], [`runlist`]); nothing here knows a number of its
//! own but those of the drawing.

pub(crate) mod dot;
pub(crate) mod engines;
mod route;
pub(crate) mod runlist;
pub(crate) mod svg;
pub(crate) mod text;

use serde::{Deserialize, Serialize};

/// A design that can be drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Design {
    /// The single-dispatch SmolLM engine (xdna1)
    Smollm,
    /// The single-dispatch Qwen2.5 engine (xdna1)
    Qwen,
    /// The chunked SmolLM graph, two layers a dispatch (xdna1)
    Decoder,
    /// The runlist of a token of the full-ELF lane (xdna2)
    Lane,
}

impl Design {
    /// Its name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Smollm => "smollm",
            Self::Qwen => "qwen",
            Self::Decoder => "decoder",
            Self::Lane => "lane",
        }
    }
}

/// An array with its object FIFOs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Array {
    pub(crate) name: String,
    pub(crate) title: String,
    pub(crate) description: String,
    pub(crate) grid: Grid,
    pub(crate) tiles: Vec<Tile>,
    pub(crate) channels: Vec<Channel>,
}

/// Columns and rows that are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Grid {
    pub(crate) columns: u8,
    pub(crate) rows: u8,
}

/// A tile in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tile {
    pub(crate) col: u8,
    pub(crate) row: u8,
    #[serde(rename = "type")]
    pub(crate) kind: TileKind,
    pub(crate) name: String,
    pub(crate) role: String,
    pub(crate) operations: Vec<String>,
}

/// Kind of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TileKind {
    Shim,
    Memtile,
    Core,
}

impl TileKind {
    /// The kind of row `row`.
    pub(crate) fn of_row(row: u8) -> Self {
        match row {
            0 => Self::Shim,
            1 => Self::Memtile,
            _ => Self::Core,
        }
    }
}

/// Where a tile is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Spot {
    pub(crate) col: u8,
    pub(crate) row: u8,
}

impl From<(u8, u8)> for Spot {
    fn from((col, row): (u8, u8)) -> Self {
        Self { col, row }
    }
}

/// An end-to-end connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Channel {
    pub(crate) name: String,
    pub(crate) source: Spot,
    pub(crate) destination: Spot,
    pub(crate) shape: String,
    /// `None` where the design does not state it.
    pub(crate) depth: Option<usize>,
    pub(crate) description: String,
}

impl Channel {
    /// The name without the number of its tile: channels of one family are drawn alike.
    pub(crate) fn family(&self) -> &str {
        self.name.trim_end_matches(|digit: char| digit.is_ascii_digit())
    }
}

impl Array {
    /// The tile at `spot`, if it is in use.
    pub(crate) fn tile(&self, spot: Spot) -> Option<&Tile> {
        self.tiles.iter().find(|tile| (tile.col, tile.row) == (spot.col, spot.row))
    }
}
