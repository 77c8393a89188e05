//! Host time of a token of the full-ELF lane: a new context length every token, on a device that does nothing, and behind the
//! virtual driver with the array left out. Last, how much of the latter is spent inside the virtual driver, which stands for
//! kernel, firmware and cache lines. The goal: 300 µs.

mod common;
#[path = "common/counted.rs"]
mod counted;
#[path = "../../backends/xdna2/tests/common/kernels.rs"]
#[allow(dead_code, reason = "the tests of the backend use the rest")]
mod kernels;

use common::median;
use counted::{Counted, Spent};
use criterion::{Criterion, criterion_group, criterion_main};
use kernels::{kernel_files, qwen3_0_6b_config};
use npuhal_amdxdna::NpuDevice;
use npuhal_amdxdna::driver::Driver;
use npuhal_core::device::Device;
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Want};
use npuhal_models::ModelConfig;
use npuhal_tests::kit::devices::NullDevice;
use npuhal_virtual::{VirtualDevice, VirtualSpec};
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::lane::{Lane, LaneOptions, LaneSource, LayerTensors};
use npuhal_xdna2::packing::{PackError, TILE_BYTES, TileSource, tiles_of};
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

const POSITIONS: u32 = 4096;
const DRIVER: &str = "virtual:npu5?array=skip";
const KINDS: [(&str, Want<'_>); 2] = [("prompt token", Want::Nothing), ("token with logits", Want::Last)];

/// Qwen3-0.6B with tiles that are never written.
struct Empty {
    config: ModelConfig,
    embedding: Vec<u8>,
}

struct EmptyTiles(usize);

impl TileSource for EmptyTiles {
    fn name(&self) -> &str {
        "empty"
    }

    fn count(&self) -> usize {
        self.0
    }

    fn available(&self) -> usize {
        self.0
    }

    fn read(&self, _: usize, _: &mut [u8; TILE_BYTES]) -> Result<(), PackError> {
        Ok(())
    }
}

impl Empty {
    fn tiles(rows: usize, columns: usize) -> Box<dyn TileSource> {
        Box::new(EmptyTiles(tiles_of(rows, columns)))
    }
}

impl LaneSource for Empty {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn layer(&self, _: usize) -> Result<LayerTensors<'_>, PackError> {
        let config = &self.config;
        let (hidden, wide, q, kv) = (config.hidden_size, config.intermediate_size, config.q_width(), config.kv_width());
        let norm = &self.embedding[..2 * hidden];
        Ok(LayerTensors {
            q: Self::tiles(q, hidden),
            k: Self::tiles(kv, hidden),
            v: Self::tiles(kv, hidden),
            o: Self::tiles(hidden, q),
            gate: Self::tiles(wide, hidden),
            up: Self::tiles(wide, hidden),
            down: Self::tiles(hidden, wide),
            input_norm: norm,
            post_attention_norm: norm,
            q_norm: None,
            k_norm: None,
        })
    }

    fn head(&self) -> Result<Box<dyn TileSource + '_>, PackError> {
        Ok(Self::tiles(self.config.vocab_size, self.config.hidden_size))
    }

    fn final_norm(&self) -> Result<&[u8], PackError> {
        Ok(&self.embedding[..2 * self.config.hidden_size])
    }

    fn embedding(&self) -> Result<&[u8], PackError> {
        Ok(&self.embedding)
    }
}

/// One token after the other, each at the next position.
struct Tokens {
    lane: Lane,
    logits: HiddenRows,
    control: Control,
    position: u32,
}

impl Tokens {
    fn new(device: Box<dyn Device>) -> Self {
        let config = qwen3_0_6b_config();
        let dimensions = Dimensions::of(&config).expect("dimensions of the lane");
        let files = kernel_files(&dimensions, POSITIONS);
        let embedding = vec![0; dimensions.vocab * dimensions.hidden_bytes()];
        let source = Box::new(Empty { config, embedding });
        let mut lane = Lane::load(device, source, &files, LaneOptions::default()).expect("a lane");
        lane.begin().expect("a context");
        Self { lane, logits: HiddenRows::new(), control: Control::new(), position: 0 }
    }

    fn next(&mut self, want: Want<'_>) {
        if self.position == POSITIONS {
            self.position = 0;
        }
        self.lane.truncate(SequenceId(0), self.position as usize);
        let row = Row { sequence: SequenceId(0), token: self.position, position: self.position };
        self.lane.forward(&[row], &mut self.logits, want, &self.control).expect("a token");
        self.position += 1;
    }
}

fn token(criterion: &mut Criterion) {
    let mut tokens = Tokens::new(Box::<NullDevice>::default());
    for (name, want) in KINDS {
        tokens.position = 0;
        criterion.bench_function(&format!("lane/28 layers/no device/{name}"), |bencher| {
            bencher.iter(|| tokens.next(want));
        });
    }
}

/// What of a token is spent inside the virtual driver. The cost of counting is measured and taken off both.
fn share_of_the_driver(_: &mut Criterion) {
    const ROUNDS: usize = 9;
    const TOKENS: u32 = 200;
    let spent = Arc::new(Spent::default());
    let mut tokens = Tokens::new(virtual_driver(&spent));
    let cost = Spent::cost();
    for (name, want) in KINDS {
        let (mut wholes, mut insides, mut calls) = (Vec::new(), Vec::new(), 0);
        // The first round loads what later ones find loaded.
        for round in 0..=ROUNDS {
            spent.take();
            let started = Instant::now();
            (0..TOKENS).for_each(|_| tokens.next(want));
            let whole_ns = started.elapsed().as_nanos() as f64;
            let (count, inside_ns) = spent.take();
            if round > 0 {
                calls = count / u64::from(TOKENS);
                let of_token = |ns: f64, counting_ns: f64| (ns - counting_ns * count as f64) / f64::from(TOKENS) / 1e3;
                wholes.push(of_token(whole_ns, cost.whole_ns));
                insides.push(of_token(inside_ns as f64, cost.inside_ns));
            }
        }
        let (whole, inside) = (median(&mut wholes), median(&mut insides));
        let _ = writeln!(
            std::io::stdout(),
            "lane/28 layers/{DRIVER}/{name}: {whole:.0} µs, of which {inside:.0} µs in {calls} calls of the virtual driver \
             and {:.0} µs before it",
            whole - inside
        );
    }
}

/// The virtual NPU's driver; its array completes every well-formed command without looking at the code.
fn virtual_driver(spent: &Arc<Spent>) -> Box<dyn Device> {
    let spec: VirtualSpec = DRIVER.parse().expect("a virtual device");
    let hardware = VirtualDevice::new(&spec);
    let driver: Arc<dyn Driver> = Counted::new(hardware.connect(), spent);
    Box::new(NpuDevice::open(driver, &hardware.identity()).expect("a device"))
}

criterion_group!(benches, token, share_of_the_driver);
criterion_main!(benches);
