/** Types that the modules of the page share. Nothing in this file runs. */

/**
 * @typedef {object} Model
 * @property {number} index
 * @property {string} name
 * @property {string[]} classes
 * @property {number} channels
 * @property {string} units
 * @property {string} stratum
 * @property {[number, number] | null} size
 * @property {[number, number] | null} window
 * @property {string} title
 */

/**
 * @typedef {object} Palette
 * @property {string[]} heat stops from 0 up
 * @property {string[]} strata
 * @property {string[]} readers
 * @property {string[]} pins
 */

/**
 * What the page is for: new images ("models"), saved predictions ("predictions") or annotations alone ("data").
 * @typedef {object} About
 * @property {string} version
 * @property {"models" | "predictions" | "data"} kind
 * @property {string} title
 * @property {Palette} palette
 * @property {string[][]} colours of the classes of each model
 * @property {number[]} evaluated class ids of the first model that metrics look at
 * @property {number | null} open the entry of the list to open first
 */

/**
 * @typedef {object} MaskAbout
 * @property {number} weight
 * @property {number[]} [strata] counted from 1
 * @property {number[]} pixels of each class, over all slices
 * @property {string} [name] of a reader, where the masks are annotations
 */

/**
 * @typedef {object} ReaderAbout
 * @property {string} name
 * @property {number[]} pixels of each class
 * @property {number} weight
 */

/**
 * @typedef {object} Summary
 * @property {string} name
 * @property {string} form
 * @property {[number, number]} size
 * @property {number} slices
 * @property {string[]} classes
 * @property {[number | null, number, number] | null} spacing in mm
 * @property {string} units
 * @property {[number, number]} range of raw values
 * @property {{name: string, weights: number[]} | null} strata
 * @property {MaskAbout[]} masks heaviest first
 * @property {number} entropy_max
 * @property {string[]} notes
 * @property {ReaderAbout[]} [readers]
 * @property {string[]} [colours] of the classes
 * @property {number[]} [evaluated]
 */

/**
 * @typedef {object} Slice
 * @property {number} k
 * @property {number} h
 * @property {number} w
 * @property {number} channels
 * @property {Float32Array | null} image [C, h, w]
 * @property {(Uint8Array | Uint16Array)[]} masks
 * @property {(Uint8Array | Uint16Array)[]} centres
 * @property {(Uint8Array | Uint16Array)[]} readers
 * @property {Uint8Array[]} marginal 255 p of each class
 * @property {Uint8Array | null} entropy 255 H / ln C
 * @property {Map<string, any>} made what was computed from it
 */

/**
 * One run's prediction of the image that is open.
 * @typedef {object} Scene
 * @property {string} id
 * @property {number} model
 * @property {string} label what the run is called on the page
 * @property {Summary} summary
 * @property {string[]} colours
 * @property {Map<number, Slice>} slices that were fetched
 * @property {number[][] | null} profile pixels of each class that are expected in each slice of a volume
 */

/** @typedef {"centre" | "mask" | "reader"} Kind what a mask is: of a stratum, drawn, or an annotation */

/**
 * @typedef {object} Mark a mask that is looked at
 * @property {number} scene
 * @property {Kind} kind
 * @property {number} index
 * @property {string} colour
 */

/** @typedef {"contours" | "marginal" | "entropy" | "disagreement"} PanelKind */

/**
 * @typedef {object} Entry of the list of images and cases
 * @property {number} index
 * @property {string} name
 * @property {string} kind
 * @property {Record<string, string | number | null>} values
 */

export {};
