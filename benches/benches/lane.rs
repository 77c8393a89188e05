//! Host time of a token of the full-ELF lane: a new context length every token, on a device that does nothing, and behind the
//! virtual driver with the array left out.

#[path = "../../backends/xdna2/tests/common/kernels.rs"]
#[allow(dead_code, reason = "the tests of the backend use the rest")]
mod kernels;

use criterion::{Criterion, criterion_group, criterion_main};
use kernels::{kernel_files, small_config};
use npuhal_amdxdna::NpuDevice;
use npuhal_core::device::Device;
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Want};
use npuhal_models::ModelConfig;
use npuhal_tests::kit::devices::NullDevice;
use npuhal_virtual::{VirtualDevice, VirtualSpec};
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::lane::{Lane, LaneOptions, LaneSource, LayerTensors};
use npuhal_xdna2::packing::{PackError, TILE_BYTES, TileSource, tiles_of};

const POSITIONS: u32 = 4096;
const DRIVER: &str = "virtual:npu5?array=skip";

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

fn token(criterion: &mut Criterion) {
    let config = ModelConfig {
        hidden_size: 1024,
        layers: 28,
        heads: 16,
        kv_heads: 8,
        intermediate_size: 3072,
        vocab_size: 151_936,
        ..small_config()
    };
    let dimensions = Dimensions::of(&config).expect("dimensions of the lane");
    let files = kernel_files(&dimensions, POSITIONS);
    let devices: [(&str, Box<dyn Device>); 2] =
        [("no device", Box::<NullDevice>::default()), (DRIVER, virtual_driver())];
    for (device_name, device) in devices {
        let embedding = vec![0; dimensions.vocab * dimensions.hidden_bytes()];
        let source = Box::new(Empty { config: config.clone(), embedding });
        let mut lane = Lane::load(device, source, &files, LaneOptions::default()).expect("a lane");
        lane.begin().expect("a context");
        let (mut logits, control) = (HiddenRows::new(), Control::new());
        for (name, want) in [("prompt token", Want::Nothing), ("token with logits", Want::Last)] {
            let mut position = 0;
            criterion.bench_function(&format!("lane/28 layers/{device_name}/{name}"), |bencher| {
                bencher.iter(|| {
                    if position == POSITIONS {
                        position = 0;
                    }
                    lane.truncate(SequenceId(0), position as usize);
                    let row = Row { sequence: SequenceId(0), token: position, position };
                    lane.forward(&[row], &mut logits, want, &control).expect("a token");
                    position += 1;
                });
            });
            lane.truncate(SequenceId(0), 0);
        }
    }
}

/// The virtual NPU's driver; its array completes every well-formed command without looking at the code.
fn virtual_driver() -> Box<dyn Device> {
    let spec: VirtualSpec = DRIVER.parse().expect("a virtual device");
    let hardware = VirtualDevice::new(&spec);
    Box::new(NpuDevice::open(hardware.connect(), &hardware.identity()).expect("a device"))
}

criterion_group!(benches, token);
criterion_main!(benches);
