//! The arrays of the xdna1 designs.

use super::{Array, Channel, Grid, Tile, TileKind};
use npuhal_core::dtype::DType;
use npuhal_models::package::Family;
use npuhal_xdna1::EngineLayout;
use npuhal_xdna1::chunk::{ChunkFormat, LAYERS_PER_DISPATCH};
use npuhal_xdna1::dataflow::{Fifo, Flow, Worker, chunk_elements, chunk_streams, chunk_workers, engine_fifos};
use npuhal_xdna1::layout::{CACHE_OBJECT_ELEMENTS, GEMV_PLACES, GEMV_TILES, HUB_PLACE, JOIN_PLACE, QWEN, SMOLLM};

/// Columns that the designs use.
const COLUMNS: u8 = 4;
/// Rows of cores of an NPU of the first generation.
const CORE_ROWS: u8 = 4;

/// The SmolLM engine.
pub(crate) fn smollm() -> Array {
    let description = format!(
        "{GEMV_TILES} GEMV tiles ({}-elem slices), 1 MemTile join, 1 Hub tile (RoPE/Attention/KV), DDR streaming.",
        SMOLLM.slice_elements
    );
    engine(&SMOLLM, "SmolLM2 135M Single-Dispatch Decoder Engine", description)
}

/// The Qwen engine.
pub(crate) fn qwen() -> Array {
    let shape = QWEN.shape();
    let description = format!(
        "{GEMV_TILES} GEMV tiles (uneven rows + LM head), 1 MemTile join, 1 Hub tile ({} Q / {} KV heads), NPU LM-head \
         streaming.",
        shape.heads, shape.kv_heads
    );
    engine(&QWEN, "Qwen2.5 0.5B Single-Dispatch Decoder Engine", description)
}

fn engine(layout: &EngineLayout, title: &str, description: String) -> Array {
    let fifos = engine_fifos(layout);
    let mut tiles: Vec<Tile> = (0..COLUMNS).map(|col| shim(col, shim_operations(&fifos, col))).collect();
    let (slice, joined) = (layout.slice_elements, layout.joined_elements());
    tiles.push(Tile {
        col: JOIN_PLACE.0,
        row: JOIN_PLACE.1,
        kind: TileKind::Memtile,
        name: "MemTile_Join".to_owned(),
        role: format!("{GEMV_TILES}-Way Slice Join"),
        operations: vec![format!("Joins {GEMV_TILES}x{slice} slices into {joined}-elem vector")],
    });
    tiles.extend(GEMV_PLACES.iter().enumerate().map(|(tile, &(col, row))| Tile {
        col,
        row,
        kind: TileKind::Core,
        name: format!("GEMV_{tile}"),
        role: format!("GEMV Tile {tile}"),
        operations: gemv_operations(layout, tile),
    }));
    let shape = layout.shape();
    let rotation = if layout.family == Family::Qwen2 { "QKV Bias Add, RoPE" } else { "RoPE" };
    tiles.push(Tile {
        col: HUB_PLACE.0,
        row: HUB_PLACE.1,
        kind: TileKind::Core,
        name: "Hub_Tile".to_owned(),
        role: "Attention Hub".to_owned(),
        operations: vec![
            format!("{rotation}, {} Q / {} KV Heads", shape.heads, shape.kv_heads),
            "Vectorized Softmax".to_owned(),
            "K/V Cache Append".to_owned(),
            format!("{joined}-Elem Broadcast"),
        ],
    });
    Array {
        name: layout.name.to_owned(),
        title: title.to_owned(),
        description,
        grid: Grid { columns: COLUMNS, rows: 2 + CORE_ROWS / 2 },
        tiles,
        channels: fifos.iter().map(|fifo| channel(layout, fifo)).collect(),
    }
}

fn shim(col: u8, operations: Vec<String>) -> Tile {
    Tile {
        col,
        row: 0,
        kind: TileKind::Shim,
        name: format!("Shim_{col}_0"),
        role: format!("DDR Shim DMA Col {col}"),
        operations,
    }
}

fn shim_operations(fifos: &[Fifo], col: u8) -> Vec<String> {
    let here = |fifo: &&Fifo| fifo.source == (col, 0) || fifo.destination == (col, 0);
    let tiles = |wanted: fn(Flow) -> Option<usize>| {
        let tiles = fifos.iter().filter(here).filter_map(|fifo| wanted(fifo.flow)).map(|tile| tile.to_string());
        tiles.collect::<Vec<_>>().join(" & ")
    };
    let weights = tiles(|flow| if let Flow::Weights(tile) = flow { Some(tile) } else { None });
    let logits = tiles(|flow| if let Flow::Logits(tile) = flow { Some(tile) } else { None });
    let has = |flow: Flow| fifos.iter().filter(here).any(|fifo| fifo.flow == flow);
    let mut operations = Vec::new();
    if !weights.is_empty() {
        operations.push(format!("Weights {weights} stream"));
    }
    if !logits.is_empty() {
        operations.push(format!("Logits {logits} stream"));
    }
    for (flow, operation) in
        [(Flow::Cache, "K/V Cache In"), (Flow::KvNew, "KvNew Out"), (Flow::HiddenOut, "Hidden Out")]
    {
        if has(flow) {
            operations.push(operation.to_owned());
        }
    }
    operations
}

fn gemv_operations(layout: &EngineLayout, tile: usize) -> Vec<String> {
    let rows = |share: npuhal_xdna1::layout::Share| format!("{}..{}", share.start, share.range().end - 1);
    let mut operations = vec![
        format!("RMSNorm, QKV rows {}", rows(layout.qkv_share(tile))),
        format!("O/Down rows {}", rows(layout.out_share(tile))),
        format!("Gate/Up rows {}", rows(layout.mlp_share(tile))),
    ];
    if layout.has_head {
        operations.push(format!("LM Head {} (FP32)", rows(layout.head_share(tile))));
    } else if tile == 0 {
        operations.push("Final norm -> Hidden Out".to_owned());
    }
    operations
}

fn channel(layout: &EngineLayout, fifo: &Fifo) -> Channel {
    let joined = layout.joined_elements();
    let (name, description) = match fifo.flow {
        Flow::Weights(tile) => (format!("weights{tile}"), format!("Weight Stream {tile}")),
        Flow::Slice(tile) => (format!("slice{tile}"), format!("Result Slice {tile}")),
        Flow::Broadcast(_) => ("broadcast".to_owned(), "Activation Broadcast".to_owned()),
        Flow::Logits(tile) => (format!("logits{tile}"), format!("LM Head Logits {tile}")),
        Flow::Joined => ("joined".to_owned(), format!("Joined {joined}-vector")),
        Flow::Cache => ("cache".to_owned(), "Header and K/V History from DDR".to_owned()),
        Flow::KvNew => ("kv_new".to_owned(), "Appended K/V to DDR".to_owned()),
        Flow::HiddenOut => ("hidden_out".to_owned(), "Final Normalized State".to_owned()),
    };
    Channel {
        name,
        source: fifo.source.into(),
        destination: fifo.destination.into(),
        shape: shape(fifo.dtype, fifo.elements),
        depth: Some(fifo.depth),
        description,
    }
}

fn shape(dtype: DType, elements: usize) -> String {
    match dtype {
        DType::F32 => format!("fp32[{elements}]"),
        other => format!("{other}[{elements}]"),
    }
}

/// The chunked SmolLM graph. Its workers fill the cores; the drawing puts them in the order of the pipeline, up and down the
/// columns, since the design leaves their places to its compiler.
pub(crate) fn decoder() -> Array {
    let workers = chunk_workers();
    let place = |worker: Worker| {
        let index = workers.iter().position(|other| *other == worker).unwrap_or(0) as u8;
        let (col, step) = (index / CORE_ROWS, index % CORE_ROWS);
        (col, 2 + if col.is_multiple_of(2) { step } else { CORE_ROWS - 1 - step })
    };
    let mut tiles: Vec<Tile> = (0..COLUMNS)
        .map(|col| {
            let stream = ["QKV", "O", "Gate/Up", "Down"][usize::from(col)];
            let mut operations = vec![format!("{stream} weight stream")];
            operations.extend(match col {
                0 => ["Hidden In, Gammas, RoPE table", "K/V Cache In/Out"].map(str::to_owned).to_vec(),
                3 => vec!["Hidden Out".to_owned()],
                _ => Vec::new(),
            });
            shim(col, operations)
        })
        .collect();
    tiles.extend(workers.iter().map(|&worker| {
        let (col, row) = place(worker);
        let (name, role, operation) = describe(worker);
        Tile { col, row, kind: TileKind::Core, name, role, operations: vec![operation] }
    }));
    let hidden = chunk_elements(Worker::InputNorm);
    let channel = |name: &str, source: (u8, u8), destination: (u8, u8), elements: usize, description: &str| Channel {
        name: name.to_owned(),
        source: source.into(),
        destination: destination.into(),
        shape: shape(DType::Bf16, elements),
        depth: None,
        description: description.to_owned(),
    };
    let mut channels = Vec::new();
    let streams = chunk_streams();
    let names = ["qkv_weights", "o_weights", "gate_up_weights", "down_weights"];
    for (name, (col, first, (rows, cols))) in names.into_iter().zip(streams) {
        let readers = workers
            .iter()
            .filter(|worker| **worker == first || matches!((first, **worker), (Worker::GateUp(_), Worker::GateUp(_))));
        for &reader in readers {
            let description = format!("Blocks of {rows}x{cols}");
            channels.push(channel(name, (col, 0), place(reader), rows * cols, &description));
        }
    }
    channels.push(channel("act_in", (0, 0), place(Worker::InputNorm), hidden, "Input Activation"));
    let mut step = |name: &str, from: Worker, to: Worker| {
        let (_, role, _) = describe(from);
        channels.push(channel(name, place(from), place(to), chunk_elements(from), &format!("From {role}")));
    };
    step("normed", Worker::InputNorm, Worker::Qkv);
    step("qkv", Worker::Qkv, Worker::Rope);
    let heads = workers.iter().filter(|worker| matches!(worker, Worker::Attention(_)));
    for &head in heads.clone() {
        step("heads", Worker::Rope, head);
    }
    for &head in heads {
        step("attended", head, Worker::OProj);
    }
    step("o_out", Worker::OProj, Worker::AttentionResidual);
    step("residual", Worker::AttentionResidual, Worker::PostNorm);
    let thirds = workers.iter().filter(|worker| matches!(worker, Worker::GateUp(_)));
    for &third in thirds.clone() {
        step("post_normed", Worker::PostNorm, third);
    }
    for &third in thirds {
        step("thirds", third, Worker::Merge);
    }
    step("merged", Worker::Merge, Worker::SwiGlu);
    step("swiglu", Worker::SwiGlu, Worker::Down);
    step("down_out", Worker::Down, Worker::MlpResidual);
    for &worker in workers.iter().filter(|worker| matches!(worker, Worker::Attention(_))) {
        channels.push(channel("cache_in", (0, 0), place(worker), CACHE_OBJECT_ELEMENTS, "K/V Cache of a Head"));
        channels.push(channel(
            "cache_out",
            place(worker),
            (0, 0),
            CACHE_OBJECT_ELEMENTS,
            "K/V Cache with the Position",
        ));
    }
    channels.push(channel("act_out", place(Worker::MlpResidual), (3, 0), hidden, "Layer Output"));
    Array {
        name: ChunkFormat::SmolLmBf16.design().to_owned(),
        title: format!("Chunked {LAYERS_PER_DISPATCH}-Layer Pipelined Decoder"),
        description: format!(
            "{} workers, four weight streams; places are this drawing's, depths are not stated by the design.",
            workers.len()
        ),
        grid: Grid { columns: COLUMNS, rows: 2 + CORE_ROWS },
        tiles,
        channels,
    }
}

/// Name, role and operation of a worker.
fn describe(worker: Worker) -> (String, String, String) {
    let named = |name: &str, role: &str, operation: &str| (name.to_owned(), role.to_owned(), operation.to_owned());
    match worker {
        Worker::InputNorm => named("Tile_Norm", "Input Norm", "RMSNorm"),
        Worker::Qkv => named("Tile_QKV", "QKV Projection", "QKV Projections"),
        Worker::Rope => named("Tile_RoPE", "RoPE Packing", "RoPE, K/V Cache Append"),
        Worker::Attention(head) => {
            (format!("Tile_Attn_{head}"), format!("Attention KV Head {head}"), "Attention, scalar exp".to_owned())
        }
        Worker::OProj => named("Tile_O", "Output Projection", "O Projection"),
        Worker::AttentionResidual => named("Tile_Add_0", "Residual Sum", "Residual add"),
        Worker::PostNorm => named("Tile_PostNorm", "Post-Attn Norm", "RMSNorm"),
        Worker::GateUp(third) => {
            (format!("Tile_GateUp_{third}"), format!("Gate/Up Part {third}"), "Gate/Up Projections".to_owned())
        }
        Worker::Merge => named("Tile_Merge", "Gate/Up Merge", "Merges the parts"),
        Worker::SwiGlu => named("Tile_SwiGLU", "SwiGLU", "SwiGLU"),
        Worker::Down => named("Tile_Down", "Down Projection", "Down Projection"),
        Worker::MlpResidual => named("Tile_Add_1", "Residual Sum", "Residual add"),
    }
}
