//! A Q4NX directory as the lane's source.

use crate::dimensions::LaneDecline;
use crate::lane::{LaneSource, LayerTensors};
use crate::packing::{PackError, TILE_BYTES, TileSource};
use npuhal_models::q4nx::{TileKind, TiledTensor};
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelConfig, ModelSource, TensorRole};

const TILED: [LayerTensor; 7] = [
    LayerTensor::Q,
    LayerTensor::K,
    LayerTensor::V,
    LayerTensor::O,
    LayerTensor::Gate,
    LayerTensor::Up,
    LayerTensor::Down,
];
const ROWS: [LayerTensor; 4] =
    [LayerTensor::InputNorm, LayerTensor::PostAttentionNorm, LayerTensor::QNorm, LayerTensor::KNorm];

/// A packed model. Keeps its mapping; tiles are copied, or repacked, as they are read.
#[derive(Debug, Clone)]
pub struct PackedModel(ModelSource);

impl PackedModel {
    /// The tensors of `model` as the lane reads them.
    ///
    /// # Errors
    /// As [`check_tensors`].
    pub fn new(model: ModelSource) -> Result<Self, LaneDecline> {
        check_tensors(&model)?;
        Ok(Self(model))
    }

    fn tiles(&self, role: TensorRole) -> Result<Box<dyn TileSource + '_>, PackError> {
        match self.0.tiled(role) {
            Some(tensor) => Ok(Box::new(Tiles(tensor))),
            None => Err(missing(role)),
        }
    }

    fn rows(&self, role: TensorRole) -> Result<&[u8], PackError> {
        self.0.tensor(role).map(npuhal_models::Tensor::bytes).ok_or_else(|| missing(role))
    }
}

/// Whether all tensors are there, matrices as tiles of a kind that the kernels read. Nothing of them is read.
///
/// # Errors
/// [`LaneDecline::NotTiled`], [`LaneDecline::TileKind`], [`LaneDecline::MissingTensor`].
pub fn check_tensors(model: &ModelSource) -> Result<(), LaneDecline> {
    let layers = 0..model.config().layers;
    let of_layer = |part| layers.clone().map(move |layer| TensorRole::Layer(layer, part));
    for role in TILED.into_iter().flat_map(of_layer).chain([TensorRole::Head]) {
        let Some(tensor) = model.tiled(role) else {
            return Err(match model.tensor(role) {
                Some(tensor) => LaneDecline::NotTiled { tensor: tensor.name().to_owned() },
                None => LaneDecline::MissingTensor { tensor: format!("{role:?}") },
            });
        };
        if !matches!(tensor.kind(), TileKind::Q4_1 | TileKind::Q4K) {
            return Err(LaneDecline::TileKind { tensor: tensor.name().to_owned(), found: tensor.kind().name() });
        }
    }
    let mut rows = ROWS.into_iter().flat_map(of_layer).chain([TensorRole::FinalNorm, TensorRole::TokenEmbedding]);
    match rows.find(|role| model.tensor(*role).is_none()) {
        Some(role) => Err(LaneDecline::MissingTensor { tensor: format!("{role:?}") }),
        None => Ok(()),
    }
}

impl LaneSource for PackedModel {
    fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    fn layer(&self, layer: usize) -> Result<LayerTensors<'_>, PackError> {
        let role = |part| TensorRole::Layer(layer, part);
        Ok(LayerTensors {
            q: self.tiles(role(LayerTensor::Q))?,
            k: self.tiles(role(LayerTensor::K))?,
            v: self.tiles(role(LayerTensor::V))?,
            o: self.tiles(role(LayerTensor::O))?,
            gate: self.tiles(role(LayerTensor::Gate))?,
            up: self.tiles(role(LayerTensor::Up))?,
            down: self.tiles(role(LayerTensor::Down))?,
            input_norm: self.rows(role(LayerTensor::InputNorm))?,
            post_attention_norm: self.rows(role(LayerTensor::PostAttentionNorm))?,
            q_norm: Some(self.rows(role(LayerTensor::QNorm))?),
            k_norm: Some(self.rows(role(LayerTensor::KNorm))?),
        })
    }

    fn head(&self) -> Result<Box<dyn TileSource + '_>, PackError> {
        self.tiles(TensorRole::Head)
    }

    fn final_norm(&self) -> Result<&[u8], PackError> {
        self.rows(TensorRole::FinalNorm)
    }

    fn embedding(&self) -> Result<&[u8], PackError> {
        self.rows(TensorRole::TokenEmbedding)
    }
}

fn missing(role: TensorRole) -> PackError {
    PackError::Source { what: format!("{role:?}"), index: 0, reason: "the model has no such tensor".to_owned() }
}

/// A matrix of the file. The reader has checked that all its tiles lie inside.
struct Tiles<'a>(&'a TiledTensor);

impl TileSource for Tiles<'_> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn count(&self) -> usize {
        self.0.tiles()
    }

    fn available(&self) -> usize {
        self.0.available().len() / self.0.kind().bytes()
    }

    fn read(&self, index: usize, into: &mut [u8; TILE_BYTES]) -> Result<(), PackError> {
        let failed = |reason: String| PackError::Source { what: self.0.name().to_owned(), index, reason };
        let tile = self.0.q4_1_tile(index).map_err(|error| failed(error.to_string()))?;
        let tile: &[u8; TILE_BYTES] =
            (*tile).try_into().map_err(|_| failed(format!("a tile of {} bytes; wanted {TILE_BYTES}", tile.len())))?;
        into.copy_from_slice(tile);
        Ok(())
    }
}
