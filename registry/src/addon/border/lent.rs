//! What the host lends a library for a call: the model, devices, options.

use crate::options::Options;
use npuhal_addon_abi as abi;
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_models::config::RopePairing;
use npuhal_models::source::LayerTensor;
use npuhal_models::{ModelSource, TensorRole};
use std::ffi::c_void;
use std::mem::size_of;

/// Structs and arrays of a call, which borrow from the host's own.
pub(super) struct Lent<'a> {
    pub(super) model: abi::Model,
    pub(super) devices: Vec<abi::Device>,
    pub(super) options: abi::Options,
    _features: Vec<Vec<abi::Str>>,
    _pairs: Vec<abi::KeyValue>,
    _numerics: String,
    _borrowed: std::marker::PhantomData<&'a ModelSource>,
}

impl<'a> Lent<'a> {
    /// `None` where the model's path is not UTF-8, which the interface cannot express.
    pub(super) fn new(model: &'a ModelSource, devices: &'a [DeviceCard], options: &'a Options) -> Option<Self> {
        let features: Vec<Vec<abi::Str>> =
            devices.iter().map(|card| card.features.iter().map(|feature| abi::Str::new(feature)).collect()).collect();
        let devices = devices.iter().zip(&features).map(|(card, features)| device(card, features)).collect();
        let pairs: Vec<abi::KeyValue> = options
            .route_options
            .iter()
            .map(|(key, value)| abi::KeyValue { key: abi::Str::new(key), value: abi::Str::new(value) })
            .collect();
        let numerics = options.numerics.to_string();
        let options = abi::Options {
            numerics: abi::Str::new(&numerics),
            threads: options.threads.map_or(0, |threads| u32::try_from(threads.get()).unwrap_or(u32::MAX)),
            context_positions: options.context_positions.unwrap_or(0),
            sequences: options.sequences.unwrap_or(0),
            reserved: 0,
            pairs: pairs.as_ptr(),
            pairs_len: pairs.len(),
        };
        Some(Self {
            model: lend_model(model)?,
            devices,
            options,
            _features: features,
            _pairs: pairs,
            _numerics: numerics,
            _borrowed: std::marker::PhantomData,
        })
    }
}

fn lend_model(model: &ModelSource) -> Option<abi::Model> {
    let (config, vocabulary) = (model.config(), model.vocabulary());
    Some(abi::Model {
        size_bytes: size_of::<abi::Model>() as u32,
        rope_pairing: u32::from(config.rope.pairing == RopePairing::Halves),
        path: abi::Str::new(model.path().to_str()?),
        model_type: abi::Str::new(&config.model_type),
        name: abi::Str::new(&config.name),
        hidden_size: config.hidden_size as u64,
        layers: config.layers as u64,
        heads: config.heads as u64,
        kv_heads: config.kv_heads as u64,
        head_dim: config.head_dim as u64,
        intermediate_size: config.intermediate_size as u64,
        vocab_size: config.vocab_size as u64,
        context_length: config.context_length as u64,
        rope_dims: config.rope.dims as u64,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.rope.theta,
        qkv_bias: u32::from(config.qkv_bias),
        qk_norm: u32::from(config.qk_norm),
        tied_head: u32::from(config.tied_head),
        bos: vocabulary.bos.unwrap_or(u32::MAX),
        eos: vocabulary.eos.as_ptr(),
        eos_len: vocabulary.eos.len(),
        handle: (&raw const *model).cast::<c_void>(),
    })
}

fn device(card: &DeviceCard, features: &[abi::Str]) -> abi::Device {
    abi::Device {
        id: abi::Str::new(&card.id),
        name: abi::Str::new(&card.name),
        generation: match card.generation {
            Generation::Xdna1 => abi::generation::XDNA1,
            Generation::Xdna2 => abi::generation::XDNA2,
            _ => abi::generation::CPU,
        },
        is_virtual: u32::from(card.is_virtual),
        columns: card.columns,
        core_rows: card.core_rows,
        memory_bytes: card.memory_bytes.unwrap_or(0),
        features: features.as_ptr(),
        features_len: features.len(),
    }
}

/// [`abi::HostTable::tensor`].
pub(super) unsafe extern "C" fn tensor(handle: *const c_void, role: u32, layer: u32, out: *mut abi::Tensor) -> i32 {
    // SAFETY: the interface says that the handle is one of a model of a call that has not ended.
    let Some(model) = (unsafe { handle.cast::<ModelSource>().as_ref() }) else { return abi::status::FAILED };
    let found = match role {
        abi::role::HEAD => model.head().ok(),
        _ => tensor_role(role, layer as usize).and_then(|role| model.tensor(role)),
    };
    let Some(tensor) = found.filter(|_| !out.is_null() && out.is_aligned()) else { return abi::status::FAILED };
    let bytes = tensor.bytes();
    let lent = abi::Tensor {
        name: abi::Str::new(tensor.name()),
        storage: abi::Str::new(tensor.weight_type().name()),
        data: bytes.as_ptr(),
        len_bytes: bytes.len(),
        rows: tensor.rows() as u64,
        cols: tensor.cols() as u64,
    };
    // SAFETY: not null and aligned; the interface says that a tensor can be written there.
    unsafe { out.write(lent) };
    abi::status::OK
}

fn tensor_role(role: u32, layer: usize) -> Option<TensorRole> {
    use npuhal_addon_abi::role;
    Some(match role {
        role::TOKEN_EMBEDDING => TensorRole::TokenEmbedding,
        role::FINAL_NORM => TensorRole::FinalNorm,
        role::ROPE_FACTORS => TensorRole::RopeFactors,
        role::INPUT_NORM => TensorRole::Layer(layer, LayerTensor::InputNorm),
        role::Q => TensorRole::Layer(layer, LayerTensor::Q),
        role::Q_BIAS => TensorRole::Layer(layer, LayerTensor::QBias),
        role::Q_NORM => TensorRole::Layer(layer, LayerTensor::QNorm),
        role::K => TensorRole::Layer(layer, LayerTensor::K),
        role::K_BIAS => TensorRole::Layer(layer, LayerTensor::KBias),
        role::K_NORM => TensorRole::Layer(layer, LayerTensor::KNorm),
        role::V => TensorRole::Layer(layer, LayerTensor::V),
        role::V_BIAS => TensorRole::Layer(layer, LayerTensor::VBias),
        role::O => TensorRole::Layer(layer, LayerTensor::O),
        role::POST_ATTENTION_NORM => TensorRole::Layer(layer, LayerTensor::PostAttentionNorm),
        role::GATE => TensorRole::Layer(layer, LayerTensor::Gate),
        role::UP => TensorRole::Layer(layer, LayerTensor::Up),
        role::DOWN => TensorRole::Layer(layer, LayerTensor::Down),
        _ => return None,
    })
}
